#!/bin/sh
# The kernels' tests under the address and undefined-behaviour sanitizers.
#
#     scripts/sanitize_kernels.sh [PYTEST ARGUMENTS]
#
# Builds the libraries of the package anew in a copy of it, instrumented, and runs tests/kernels (or
# what the arguments say) against that copy; the checkout keeps its own. The first error ends the
# run with a report. Leaks aren't looked for: Python and torch keep memory until the end.
set -eu
[ $# -gt 0 ] || set -- tests/kernels

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
compiler=${CC:-gcc}
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT

cp -r "$root/src" "$root/tests" "$root/setup.py" "$root/pyproject.toml" "$root/README.md" \
    "$root/LICENSE" "$copy"
rm -f "$copy"/src/staffel/kernels/*.so
cd "$copy"
CFLAGS="-g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all" \
    LDFLAGS="-fsanitize=address,undefined" CC="$compiler" \
    "$python" setup.py -q build_ext --inplace

# The sanitizers have to be there before Python itself.
LD_PRELOAD="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libubsan.so)" \
    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH="$copy/src" \
    "$python" -m pytest -q -p no:cacheprovider "$@"
