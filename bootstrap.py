"""Makes the virtual environment that the Makefile runs in. Standard library only, so that it can say what is wrong anywhere.

    python3 bootstrap.py [--dev]

Installs requirements.txt (with --dev: requirements-dev.txt too) and the demo model's weights, once per change of those
files. Exits with 1 and one sentence when the machine cannot do it.
"""

import hashlib
import os
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.abspath(__file__))
VENV = os.environ.get("POLYMORPH_VENV", os.path.join(ROOT, ".venv"))
PYTHON = os.path.join(VENV, "bin", "python")
OLDEST = (3, 11)
NEEDED_GB = 4.0


def fail(sentence):
    print("polymorph: " + sentence, file=sys.stderr)
    sys.exit(1)


def check_machine():
    if sys.version_info < OLDEST:
        fail(
            "Python %d.%d or newer is needed, and this is %d.%d. Install it, or name one: make PYTHON=/path/to/python3.11 run"
            % (OLDEST + tuple(sys.version_info[:2]))
        )
    parent = os.path.dirname(VENV) or "."
    if not os.access(parent, os.W_OK):
        fail(
            "the folder %s cannot be written to. Give yourself write access, or set POLYMORPH_VENV to another folder."
            % parent
        )
    if not os.path.exists(PYTHON):
        free = shutil.disk_usage(parent).free / 1e9
        if free < NEEDED_GB:
            fail(
                "%.1f GB are free in %s and %.0f GB are needed. Free some space, or set POLYMORPH_VENV to a folder on another disk."
                % (free, parent, NEEDED_GB)
            )
    if shutil.which("g++") is None:
        print(
            "polymorph: no C++ compiler (g++) was found: candidates with C++ kernels or torch.compile are off. "
            "Install g++ to switch them on.",
            file=sys.stderr,
        )


def stamp(files):
    digest = hashlib.sha256(sys.version.encode())
    for name in files:
        with open(os.path.join(ROOT, name), "rb") as handle:
            digest.update(name.encode() + b"\0" + handle.read())
    return digest.hexdigest()


def pip(*arguments):
    command = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "-q", *arguments]
    if subprocess.call(command) != 0:
        fail(
            "pip could not install " + " ".join(arguments) + ". Read its lines above; then run the same command again."
        )


def install(dev):
    files = ["requirements.txt", "requirements-demo.txt"] + (["requirements-dev.txt"] if dev else [])
    marker = os.path.join(VENV, "polymorph-dev" if dev else "polymorph-run")
    wanted = stamp(files)
    if os.path.exists(marker):
        with open(marker) as handle:
            if handle.read() == wanted:
                return
    if not os.path.exists(PYTHON):
        print("polymorph: making the virtual environment %s" % VENV)
        if subprocess.call([sys.executable, "-m", "venv", VENV]) != 0:
            fail("the virtual environment could not be made. On Debian and Ubuntu: apt install python3-venv")
    print("polymorph: installing (a few minutes the first time)")
    pip("-r", os.path.join(ROOT, "requirements-dev.txt" if dev else "requirements.txt"))
    pip("--no-deps", "-r", os.path.join(ROOT, "requirements-demo.txt"))
    with open(marker, "w") as handle:
        handle.write(wanted)


if __name__ == "__main__":
    check_machine()
    install("--dev" in sys.argv[1:])
