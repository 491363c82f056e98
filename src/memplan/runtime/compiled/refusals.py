"""What is run plainly because of what it is, before anything is recorded."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from memplan.runtime.compiled.not_capturable import NotCapturable

_WRAPPERS = {
    "torch.nn.parallel": "reduces gradients in hooks of autograd",
    "torch.distributed": "gathers and reduces in hooks",
    "deepspeed": "runs the step in an engine of its own",
}


def check_model(modules: Iterable[torch.nn.Module]) -> None:
    """Raises NotCapturable for modules that communicate in hooks, and for compiled ones."""
    for module in modules:
        for inner in module.modules():
            name = type(inner).__name__
            for home, reason in _WRAPPERS.items():
                if type(inner).__module__.startswith(home):
                    raise NotCapturable(
                        f"{name} {reason}", hint="compile the step of one process, without it"
                    )
            if name == "OptimizedModule" or inner._compiled_call_impl is not None:
                raise NotCapturable(
                    f"{type(getattr(inner, '_orig_mod', inner)).__name__} is under torch.compile, "
                    "whose kernels are one operator",
                    hint="memplan.compile the step of the plain module",
                )
        check_parameters(module.named_parameters())


def check_parameters(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises NotCapturable for those with hooks, which are Python that a graph would lose, and for
    those that are more than a strided tensor."""
    for name, parameter in parameters:
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise NotCapturable(
                f"a hook on the gradient of {name} runs Python in backward",
                hint="do in the step, after backward, what the hook does",
            )
        if type(parameter).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise NotCapturable(f"{name} is a {type(parameter).__name__}, no plain tensor")


def check_optimizer(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raises NotCapturable for an optimizer that calls the step back."""
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise NotCapturable(
                "LBFGS runs the step as often as the loss asks for",
                hint="an optimizer that steps once, such as Adam",
            )
