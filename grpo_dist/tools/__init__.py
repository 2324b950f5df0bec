"""Commands other than training: check, plan, bench, evaluate, report, recipe, scoring, submit."""
