# Sourced by the scripts: a virtual environment of the project's own, filled from pyproject.toml and constraints.txt.
# usage: ensure_venv EXTRAS   ("" or e.g. "[test]"); a second call with nothing changed takes milliseconds.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="${SWARMTRAIN_VENV:-$root/.venv}"

ensure_venv() {
  local extras=$1 python wanted
  python=${PYTHON:-python3}
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "swarmtrain needs Python 3.11 or newer; this is $("$python" --version). Set PYTHON=/path/to/python3.11" >&2
    return 2
  }
  wanted=$(cat "$root/pyproject.toml" "$root/constraints.txt" | sha256sum | cut -d' ' -f1)
  for installed in "$extras" "[test]"; do # what the tests need includes what the demo needs
    if [ "$(cat "$venv/.installed$installed" 2>/dev/null)" = "$wanted" ]; then return 0; fi
  done
  echo "installing into $venv (first time: some minutes) ..." >&2
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  "$venv/bin/pip" install --quiet --constraint "$root/constraints.txt" --editable "$root$extras" 2>&1 |
    sed '/^WARNING: Location/d' >&2 || { echo "installing failed" >&2; return 1; }  # the scripts set pipefail
  echo "$wanted" > "$venv/.installed$extras"
}
