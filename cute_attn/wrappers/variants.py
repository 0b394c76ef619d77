"""What runs settle of a plan: options that `forward` replaces, and heads, of which a plan names the most.

Each combination is a `Variant` with a schedule at an address of its own, so that a captured graph may hold several.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from cute_attn.errors import RuntimeArgumentError
from cute_attn.problem import BatchPlan, Settings
from cute_attn.runtime.staging import Staging

MAX_VARIANTS = 64  # per plan: options that change with every `forward` must not fill memory


@dataclass
class Variant:
    """One combination of what runs settled, and its schedule."""

    overrides: dict[str, Any]  # options of the plan that runs replaced
    staging: Staging
    backend: str | None = None  # with CUDA graphs the name of the first schedule's: captured launches cannot move
    plan: BatchPlan | None = None  # None: the plan in force has not been scheduled for it
    used: bool = False  # a run launched it since the last plan; with CUDA graphs: ever, so a graph may hold it


@dataclass
class Variants:
    """The variants of a plan. `base` has the options of the plan itself."""

    base: Variant
    settings: Settings | None = None  # of `base`
    by_settings: dict[Settings, Variant] = field(default_factory=dict)
    by_options: dict[Any, Variant] = field(default_factory=dict)  # by the arguments of `forward`, which cost less

    @classmethod
    def on(cls, device: torch.device) -> Variants:
        return cls(Variant({}, Staging(device)))

    def following(self, settings: Settings, keep: bool) -> tuple[Variants, list[Variant]]:
        """Return the variants of a plan with these settings, none of them scheduled, and those to schedule with it.

        These are the ones that ran under this plan, if the settings are the same, else the base. `keep`: they stay
        marked as used.
        """
        if settings != self.settings:
            base = Variant({}, self.base.staging)
            return Variants(base, settings, {settings: base}), [base]
        by_settings = {
            key: Variant(old.overrides, old.staging, old.backend, used=old.used)
            for key, old in self.by_settings.items()
            if old.used or old is self.base
        }
        base = by_settings[settings]
        due = [variant for variant in by_settings.values() if variant.used] or [base]
        for variant in due:
            variant.used = variant.used and keep
        return Variants(base, settings, by_settings), due

    def sharing(self, staging: Staging) -> Variant:
        """Return the variant with this staging."""
        return next(variant for variant in self.by_settings.values() if variant.staging is staging)

    def add(self, settings: Settings, variant: Variant, keep: bool) -> None:
        """Add a variant, in place of the oldest if there are too many. `keep`: none that ran may go."""
        if len(self.by_settings) >= MAX_VARIANTS:
            spare = [k for k, old in self.by_settings.items() if old is not self.base and not (keep and old.used)]
            if not spare:
                raise RuntimeArgumentError(
                    f"runs of a wrapper with use_cuda_graph=True may differ in at most {MAX_VARIANTS} combinations of "
                    "heads and options of forward(), which captured graphs may hold; use another wrapper"
                )
            del self.by_settings[spare[0]]
            self.by_options.clear()
        self.by_settings[settings] = variant
