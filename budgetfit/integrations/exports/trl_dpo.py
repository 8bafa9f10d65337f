"""TRL's ``DPOTrainer``, for the command line."""

from budgetfit.integrations.exports.trl import dpo_text as export_text

__all__ = ["export_text"]
