"""`torch.compile` in a capture: Dynamo, AOTAutograd and Inductor run as they are; only the kernels
that they would generate are not compiled, and the code that launches them allocates fakes.

`docs/compile.md` says what is exact and what is a rule.
"""

from memplan.capturing.compiled.session import Compiled

__all__ = ["Compiled"]
