"""TRL: the DPO script as ``export_text``, for ``budgetfit export --to dpo``."""

from budgetfit.integrations.exports.trl import dpo_text as export_text

__all__ = ["export_text"]
