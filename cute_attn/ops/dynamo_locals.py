"""`locals()` under the Dynamo of torch 2.11, which cannot trace it; later releases can.

The import of this module teaches it. To be deleted with the support of torch 2.11.
"""

from __future__ import annotations

from typing import Any

import torch


def _teach() -> None:
    from torch._dynamo.variables.base import ValueMutationNew
    from torch._dynamo.variables.builtin import BuiltinVariable
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.dicts import ConstDictVariable

    def call_locals(self: BuiltinVariable, translator: Any) -> ConstDictVariable:
        """Return the variables of the traced frame, none of which is that of a closure."""
        values = {ConstantVariable.create(name): value for name, value in translator.symbolic_locals.items()}
        return ConstDictVariable(values, dict, mutation_type=ValueMutationNew())

    builtins: Any = BuiltinVariable
    builtins.call_locals = call_locals


if torch.__version__ < "2.12":
    _teach()
