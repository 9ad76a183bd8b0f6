"""Programs for developers (`python -m mlc_amd.tools.dev.NAME --help`), and stand-ins for AMD GPUs that these and the
tests share. No other package imports this one."""
