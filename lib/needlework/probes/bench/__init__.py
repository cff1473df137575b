"""The bench on which every instrument works: prompts, grading, the journal, the budget, and what is shown meanwhile."""
