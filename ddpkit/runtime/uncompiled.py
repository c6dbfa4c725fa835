"""Keep classes out of torch.compile, for a program that compiles a module which communicates."""

import inspect

import torch


def uncompiled(cls: type) -> type:
    """Decorate a class: torch.compile neither traces nor compiles its methods, nor what they call.

    `torch.compiler.disable` does the same for a function, and imports the compiler, for seconds.
    """
    compiler = torch._C._dynamo.eval_frame
    skip = compiler._FrameExecStrategy(compiler._FrameAction.SKIP, compiler._FrameAction.SKIP)
    for method in vars(cls).values():
        if inspect.isfunction(method):
            method._torchdynamo_disable = True
            compiler.set_code_exec_strategy(method.__code__, skip)
    return cls
