"""Run as a process: reads the words of `accelerate launch` with accelerate's own code.

A `Question` comes on stdin, a `Reading` goes to stdout. The environment is the one that
accelerate's launcher prepares, less what was there before.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import Any, NoReturn

import msgspec

from memplan.cli.launchers.accelerate import Question, Reading

_ASK_FOR_NUMBER = "--num_processes 8, or --gpus-per-node 8 before accelerate"


class _RefusedError(Exception):
    """accelerate's parser does not take the words."""


def read(question: Question) -> Reading:
    """Raises whatever accelerate raises."""
    import torch
    from accelerate.commands import launch
    from accelerate.commands.config.config_args import default_config_file
    from accelerate.utils import launch as preparing

    parser = launch.launch_command_parser()
    parser.error = _refuse
    args = parser.parse_args(question.words)
    gpus = args.num_processes or question.gpus_per_node or 0
    # The job's GPUs, not this machine's: accelerate asks for their number.
    torch.cuda.is_available = lambda: gpus > 0
    torch.cuda.device_count = lambda: gpus
    torch.cuda.is_bf16_supported = lambda *_args, **_kwargs: True
    preparing.is_port_in_use = lambda *_args: False
    args, settings, precision_from_settings = launch._validate_launch_command(args)
    if problem := _unsupported(args):
        return problem
    environment = _environment(preparing, args, settings, precision_from_settings)
    return Reading(
        program=[args.training_script, *args.training_script_args],
        is_module=bool(args.module),
        is_command=bool(args.no_python),
        processes=args.num_processes if _is_distributed(args) else 0,
        machines=args.num_machines or 1,
        role=args.role,
        environment=environment,
        settings=(args.config_file or default_config_file) if settings is not None else "",
    )


def _is_distributed(args: argparse.Namespace) -> bool:
    """Whether accelerate would hand the job to torch's elastic agent or to DeepSpeed's."""
    several = args.use_deepspeed or args.use_fsdp or args.multi_gpu or args.use_megatron_lm
    return bool(several) and not args.cpu


def _unsupported(args: argparse.Namespace) -> Reading | None:
    if args.tpu:
        return Reading(error="TPUs are not CUDA devices", hint="leave --tpu out")
    if not args.num_processes and not args.cpu:
        return Reading(
            error="it starts one process for each GPU of the machine it runs on, and they are not "
            "known here",
            hint=_ASK_FOR_NUMBER,
        )
    return None


def _environment(
    preparing: Any, args: argparse.Namespace, settings: Any, precision_from_settings: bool
) -> dict[str, str]:
    before = dict(os.environ)
    if args.use_deepspeed and not args.cpu:
        fields = list(settings.deepspeed_config) if settings else []
        fields += ["mixed_precision"] if precision_from_settings else []
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        # Its multi-node runners go over ssh; what the processes find is the same.
        args.deepspeed_multinode_launcher = "standard"
        _, prepared = preparing.prepare_deepspeed_cmd_env(args)
    elif _is_distributed(args):
        prepared = preparing.prepare_multi_gpu_env(args)
    else:
        _, prepared = preparing.prepare_simple_launcher_cmd_env(args)
    return {name: value for name, value in prepared.items() if before.get(name) != value}


def _refuse(message: str) -> NoReturn:
    raise _RefusedError(message)


def _answer(question: Question) -> Reading:
    try:
        return read(question)
    except _RefusedError as error:
        return Reading(error=str(error), hint="accelerate launch --help")
    except (Exception, SystemExit) as error:
        text = str(error).strip() or type(error).__name__
        return Reading(
            error=text.splitlines()[0], hint="the same command without memplan says more"
        )


if __name__ == "__main__":
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    with contextlib.redirect_stdout(sys.stderr):
        answer = _answer(asked)
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
