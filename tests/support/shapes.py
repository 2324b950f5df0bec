"""The type checker of the import hook: arguments, results, and the shapes that jaxtyping writes into them."""

from beartype import BeartypeConf, beartype

# Accept an int for a float, as mypy does.
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
