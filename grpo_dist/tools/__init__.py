"""Commands beside a run: check, plan, bench, evaluate, report, recipe, scoring, submit."""
