"""What flows from step to step: documents, what filters did with them, and counts that add up."""
