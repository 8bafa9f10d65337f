"""An api that records how it was called, so that no test here needs torch."""

from typing import Any

from tests.reporting.sample_plans import (
    sample_cards,
    sample_estimate,
    sample_layers,
    sample_model,
    sample_plan,
    sample_verification,
)


class FakeApi:
    """``budgetfit``'s public names, answering from a table or raising."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...], dict[str, Any]]] = []
        self.error: BaseException | None = None
        self.answers: dict[str, Any] = {
            "plan": sample_plan(),
            "estimate_settings": (sample_estimate(), sample_model()),
            "layers": sample_layers(),
            "compare": (sample_cards(), sample_model()),
            "verify": sample_verification(),
            "check": sample_estimate(),
        }

    def _called(self, name: str, args: tuple[object, ...], kwargs: Any) -> Any:
        self.calls.append((name, args, kwargs))
        print("a factory prints")  # noqa: T201 - it must not reach stdout
        if self.error is not None:
            raise self.error
        return self.answers[name]

    def plan(self, *args: object, **kwargs: object) -> object:
        return self._called("plan", args, kwargs)

    def estimate_settings(self, *args: object, **kwargs: object) -> object:
        return self._called("estimate_settings", args, kwargs)

    def compare(self, *args: object, **kwargs: object) -> object:
        return self._called("compare", args, kwargs)

    def layers(self, *args: object, **kwargs: object) -> object:
        return self._called("layers", args, kwargs)

    def plan_in_loop(self, plan: object, *_: object) -> object:
        return plan

    def check(self, *args: object, **kwargs: object) -> object:
        return self._called("check", args, kwargs)

    def library_versions(self) -> dict[str, object]:
        return {"torch": "9.0", "transformers": "9.1", "budgetfit": "0.1"}

    def verify(self, *args: object, **kwargs: object) -> object:
        return self._called("verify", args, kwargs)
