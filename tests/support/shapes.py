"""The type checker of the import hook: arguments, results, and the shapes that jaxtyping writes into them."""

from beartype import BeartypeConf, beartype

# An int is a float, as for mypy.
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
