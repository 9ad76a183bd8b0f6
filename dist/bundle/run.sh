#!/bin/sh
# Runs the model of this folder with whatever Python the machine has: run.sh [COMMAND [arguments]]; without any, a chat.
# Needs no installation, writes nothing here, and takes nothing from the machine's own Python packages.
here=$(dirname -- "$(readlink -f -- "$0")")

if [ "$(uname -s) $(uname -m)" != "Linux x86_64" ]; then
    echo "error: this bundle is for Linux on x86-64, and this is $(uname -s) on $(uname -m)" >&2
    exit 1
fi

suits() {
    "$1" -I -S -c 'import sys; sys.exit(sys.implementation.cache_tag not in "@TAGS@".split())' 2>/dev/null
}

python=
for version in '' @PYTHONS@; do
    if suits "python${version:-3}"; then
        python=python${version:-3}
        break
    fi
done
if [ -z "$python" ]; then
    echo "error: no Python that this bundle can use is in PATH; it needs one of @PYTHONS@" >&2
    exit 1
fi

# -I -S: only the standard library and this folder. Bytecode is kept in the user's cache; without one, nowhere.
cache=${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}}
if [ -n "$cache" ]; then
    exec "$python" -I -S -X pycache_prefix="$cache/mlc-amd/python-@DIGEST@" -- "$here/start.py" "$@"
fi
exec "$python" -I -S -B -- "$here/start.py" "$@"
