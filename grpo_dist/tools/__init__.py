"""Commands besides training: check, plan, bench, evaluate, report, recipe, scoring, submit."""
