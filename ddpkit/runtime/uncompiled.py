"""Keep torch.compile away from ddpkit's process groups and their handles, whose code breaks it.

The decorator `uncompiled` of their classes does it. So a program can compile a module that
communicates, as `torch.compile(DDP(model))` does.
"""

import inspect

import torch


def uncompiled(cls: type) -> type:
    """Change `cls` so that torch.compile leaves its methods alone, with all they call; return it.

    Inside a compiled program they run as plain Python. This holds for plain methods in the body of
    the class, not for inherited ones, properties, static or class methods. `torch.compiler.disable`
    would do the same for each method, but imports the compiler, which takes seconds.
    """
    compiler = torch._C._dynamo.eval_frame
    skip = compiler._FrameExecStrategy(compiler._FrameAction.SKIP, compiler._FrameAction.SKIP)
    for method in vars(cls).values():
        if inspect.isfunction(method):
            method._torchdynamo_disable = True
            compiler.set_code_exec_strategy(method.__code__, skip)
    return cls
