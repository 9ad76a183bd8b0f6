"""Programs for developers (`python -m tests.dev.NAME --help`), and stand-ins for AMD GPUs that these and the
tests share. No other package imports this one."""
