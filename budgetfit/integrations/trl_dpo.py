"""TRL's ``DPOTrainer``, for the command line."""

from budgetfit.integrations.trl import dpo_text as export_text

__all__ = ["export_text"]
