"""Public calls as operators of torch.library, namespace `cute_attn`: how `torch.compile` sees them.

A public function declares an operator (`declare.py`). Under Dynamo its first statement hands its `locals()` to that
operator instead (`trace.py`), whose implementation is the public function itself (`register.py`). Operators are
registered when a call is first traced. Outside of Dynamo nothing here runs.
"""
