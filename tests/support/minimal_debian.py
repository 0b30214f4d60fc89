"""A minimal Debian in a folder, made by ``debootstrap``, and commands in it.

It takes the package mirrors, the proxies and pip's settings from this machine.
"""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.paths import copy_checkout

# Debian's present releases, and their Pythons.
RELEASES = {"bookworm": "Python 3.11", "trixie": "Python 3.13"}
PACKAGES = ("git", "make", "python3-venv")
CHECKOUT = "/root/megatron_rc"
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
# Mounts, processes and network interfaces of a command end with it.
NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
# Variables of this machine that programs need to reach package indexes.
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
PASSED_ON = (*PROXIES, *(name.upper() for name in PROXIES), *CERTIFICATES, "TORCH_INDEX")


def why_not():
    """Return the reason why this machine cannot make a Debian, or an empty text."""
    missing = [program for program in ("debootstrap", "unshare", "ip") if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    if os.geteuid() != 0:
        return "debootstrap needs root"
    mounted = subprocess.run([*NAMESPACES, "--net", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True)
    if mounted.returncode:
        return "this machine lets nobody mount in a namespace"
    return ""


class MinimalDebian:
    """A Debian with git, make, python3-venv and a copy of this checkout, in a new folder."""

    def __init__(self, release, folder):
        self.folder = folder
        command = [*NAMESPACES, "debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}"]
        subprocess.run([*command, release, str(folder), debian_mirror()], check=True)

        # debootstrap writes none. Debian's installer names the IPv6 loopback too, as not every container does.
        hosts = Path("/etc/hosts").read_text(encoding="utf-8")
        (folder / "etc" / "hosts").write_text(f"{hosts}\n::1 localhost ip6-localhost ip6-loopback\n", encoding="utf-8")
        copy_checkout(folder / CHECKOUT.lstrip("/"))

    def run(self, command, *, offline=False):
        """Run a shell command in the checkout's copy and return the finished process.

        With ``offline`` it has no network but the loopback interface.
        """
        settings = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        settings |= pip_settings()

        command_in_namespaces = list(NAMESPACES)
        if offline:
            command_in_namespaces.append("--net")
        command_in_namespaces += ["sh", "-e", "-c", self._script(command, lent_paths(settings))]
        return subprocess.run(
            command_in_namespaces,
            env=settings | {"HOME": "/root", "PATH": os.environ["PATH"]},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def _script(self, command, lent):
        """Return shell lines that mount what programs expect, bring the loopback interface up, and enter."""
        root = shlex.quote(str(self.folder))
        lines = [
            "ip link set lo up",
            f"mount -t proc proc {root}/proc",
            f"mount --rbind /sys {root}/sys",
            f"mount --rbind /dev {root}/dev",
            f"mount -t tmpfs -o mode=1777 tmpfs {root}/dev/shm",
        ]
        for path in lent:
            self._make_mount_point(path)
            lines.append(f"mount -o bind,ro {shlex.quote(str(path))} {root}{shlex.quote(str(path))}")

        # The shell stays the first process, because it reaps the processes of parents that have ended.
        inside = f"export PATH={PATH}; cd {CHECKOUT}; {command}"
        lines += [f"chroot {root} /bin/sh -c {shlex.quote(inside)} && code=0 || code=$?", "exit $code"]
        return "\n".join(lines)

    def _make_mount_point(self, path):
        inside = self.folder / path.relative_to("/")
        if path.is_dir():
            inside.mkdir(parents=True, exist_ok=True)
        else:
            inside.parent.mkdir(parents=True, exist_ok=True)
            inside.touch()


def debian_mirror():
    """Return this machine's mirror if it is a Debian, else Debian's own address."""
    if shutil.which("apt-get") is None:
        return "http://deb.debian.org/debian"
    command = ["apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI)"]
    targets = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    addresses = re.findall(r"^Debian (https?://\S+)$", targets, flags=re.MULTILINE)
    return addresses[0] if addresses else "http://deb.debian.org/debian"


def pip_settings():
    """Return pip's settings, from its files and variables on this machine, as variables."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    values = {}
    for section, key, value in re.findall(r"^([^.]+)\.([\w-]+)=(.*)$", listed, flags=re.MULTILINE):
        values[section, key] = ast.literal_eval(value)

    settings = {}
    for section in ("global", "install", ":env:"):  # the later has precedence
        for (its_section, key), value in values.items():
            if its_section == section and key != "config-file":
                settings["PIP_" + key.upper().replace("-", "_")] = " ".join(value.split())
    return settings


def lent_paths(settings):
    """Return the files and folders of this machine that variables name, such as certificates and folders of wheels."""
    paths = set()
    for value in settings.values():
        for word in value.split():
            address = urlsplit(word)
            path = Path(address.path)
            if address.scheme == "file" and path.parent != Path("/"):
                path = path.parent  # an index's pages may name files beside its own folder
            if address.scheme in ("", "file") and path.is_absolute() and path.exists():
                paths.add(path)
    return sorted(path for path in paths if not paths & set(path.parents))
