"""What looks at a run from outside: sessions of any script, traces, dumps, and why it hangs."""
