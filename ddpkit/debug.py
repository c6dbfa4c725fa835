"""The command `torchrun … -m ddpkit.debug SCRIPT`: `ddpkit.inspect.debug` runs it."""

from .inspect.debug import main

if __name__ == "__main__":
    main()
