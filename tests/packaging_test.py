"""The scripts that make a release: licences, the wheel, the C library's version, the examples."""

import base64
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import unittest
import zipfile

PROJECT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(PROJECT, ".ci/packaging"))

import docs  # noqa: E402
import inventory  # noqa: E402
import wheel  # noqa: E402


class Licences(unittest.TestCase):
    def test_an_expression_is_read_as_spdx_means_it(self):
        allow = ["MIT", "Apache-2.0", "ISC", "Apache-2.0 WITH LLVM-exception"]
        for good in ["MIT", "MIT OR GPL-3.0", "GPL-3.0 / MIT", "GPL-3.0/Apache-2.0", "(GPL-3.0 OR MIT) AND ISC", "GPL-3.0 OR MIT AND ISC",
                     "Apache-2.0 WITH LLVM-exception AND MIT"]:
            self.assertTrue(inventory.allowed(good, allow), good)
        for bad in ["GPL-3.0", "MIT AND GPL-3.0", "(MIT OR ISC) AND GPL-3.0", "MIT WITH Some-exception", None, "", "MIT OR", "(MIT", "MIT MIT"]:
            self.assertFalse(inventory.allowed(bad, allow), bad)

    def test_a_crate_that_breaks_a_rule_is_named(self):
        crate = {"name": "bad", "version": "1.2.3", "license": "GPL-3.0", "rust_version": "1.99"}
        lines = list(inventory.complaints([crate], ["MIT"], "1.88"))
        self.assertEqual(len(lines), 2)
        self.assertTrue(all(line.startswith("bad 1.2.3: ") for line in lines), lines)
        fine = {"name": "good", "version": "1.0.0", "license": "MIT", "rust_version": "1.88"}
        self.assertEqual(list(inventory.complaints([fine, {**fine, "rust_version": None}], ["MIT"], "1.88.0")), [])

    def test_the_product_holds_what_is_linked_and_nothing_else(self):
        package = lambda name, kind="lib": {"id": name, "name": name, "version": "1.0.0", "targets": [{"kind": [kind]}]}
        dependency = lambda name, kind=None: {"pkg": name, "dep_kinds": [{"kind": kind}]}
        data = {
            "packages": [package("root"), package("used"), package("macro", "proc-macro"), package("of-macro"), package("test"), package("build")],
            "resolve": {"root": "root", "nodes": [
                {"id": "root", "deps": [dependency("used"), dependency("macro"), dependency("test", "dev"), dependency("build", "build")]},
                {"id": "macro", "deps": [dependency("of-macro")]},
                *({"id": name, "deps": []} for name in ("used", "of-macro", "test", "build")),
            ]},
        }
        self.assertEqual([found["name"] for found in inventory.linked(data)], ["root", "used"])


    def test_no_lock_file_is_left_out(self):
        locks = subprocess.run(["git", "ls-files", "*Cargo.lock"], cwd=PROJECT, stdout=subprocess.PIPE, check=True, text=True).stdout.split()
        self.assertEqual(sorted(inventory.MANIFESTS), sorted(lock.replace(".lock", ".toml") for lock in locks))


class Documentation(unittest.TestCase):
    def test_every_link_leads_to_what_is_carried_or_to_the_release(self):
        with tempfile.TemporaryDirectory() as out:
            docs.lay(out, "1.2.3")
            release = f"{docs.repository()}/blob/v1.2.3/"
            carried, elsewhere = 0, 0
            for folder, _, names in os.walk(out):
                for name in names:
                    if not name.endswith(".md"):
                        continue
                    with open(os.path.join(folder, name), encoding="utf-8") as file:
                        links = re.findall(r"\]\(([^)#]+)", file.read())
                    for link in links:
                        if link.startswith(release):
                            elsewhere += 1
                            self.assertTrue(os.path.exists(os.path.join(PROJECT, link[len(release):])), f"{name}: {link}")
                        elif "://" not in link:
                            carried += 1
                            self.assertTrue(os.path.exists(os.path.join(folder, link)), f"{name}: {link}")
            self.assertGreater(carried, 30)
            self.assertGreater(elsewhere, 5)


class Wheel(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.TemporaryDirectory()
        self.addCleanup(self.dir.cleanup)
        root = os.path.join(self.dir.name, "root")
        for name, text in [("bin/towline", "#!/bin/sh\necho \"$(dirname \"$0\") $*\"\n"), ("lib/towline/libnccl-net.so", "library"),
                           ("share/doc/towline/LICENSE-MIT", "mit"), ("share/doc/towline/LICENSE-APACHE", "apache"),
                           ("share/doc/towline/THIRD-PARTY-LICENCES", "others")]:
            path = os.path.join(root, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        os.symlink("libnccl-net.so", os.path.join(root, "lib/towline/libnccl-net-towline.so"))
        self.path = wheel.build(root, "1.2.3", "manylinux_2_34_x86_64", self.dir.name)
        self.root = root

    def test_the_record_has_every_file_with_its_digest(self):
        with zipfile.ZipFile(self.path) as archive:
            record = archive.read("towline_nccl-1.2.3.dist-info/RECORD").decode().splitlines()
            rows = dict((line.split(",")[0], line.split(",")[1:]) for line in record)
            self.assertEqual(set(rows), set(archive.namelist()))
            for name, (digest, size) in rows.items():
                if not name.endswith("/RECORD"):
                    data = archive.read(name)
                    expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                    self.assertEqual((digest, size), (f"sha256={expected}", str(len(data))), name)

    def test_two_builds_are_the_same_bytes(self):
        with open(self.path, "rb") as first:
            before = first.read()
        with open(wheel.build(self.root, "1.2.3", "manylinux_2_34_x86_64", self.dir.name), "rb") as second:
            self.assertEqual(before, second.read())

    def test_the_installed_package_finds_its_library_and_starts_its_program(self):
        site = os.path.join(self.dir.name, "site")
        with zipfile.ZipFile(self.path) as archive:
            archive.extractall(site)
        os.chmod(os.path.join(site, "towline_nccl/bin/towline"), 0o755)  # as pip does, by the mode in the archive
        call = [sys.executable, "-B", "-c", "import os, towline_nccl as t; e = t.environment(); print(os.path.exists(e['NCCL_NET_PLUGIN']), e['NCCL_NET'])"]
        said = subprocess.run(call, env={"PYTHONPATH": site}, stdout=subprocess.PIPE, check=True, text=True).stdout
        self.assertEqual(said, "True Towline\n")
        call = [sys.executable, "-B", "-m", "towline_nccl", "doctor", "--json"]
        said = subprocess.run(call, env={"PYTHONPATH": site, "PATH": os.environ["PATH"]}, stdout=subprocess.PIPE, check=True, text=True).stdout
        self.assertEqual(said, f"{site}/towline_nccl/bin doctor --json\n")

    def test_the_program_and_the_libraries_may_be_run_after_pip_has_unpacked_them(self):
        with zipfile.ZipFile(self.path) as archive:
            modes = {entry.filename: entry.external_attr >> 16 & 0o777 for entry in archive.infolist()}
        self.assertEqual(modes["towline_nccl/bin/towline"], 0o755)
        self.assertEqual(modes["towline_nccl/__init__.py"], 0o644)


class GlibcVersion(unittest.TestCase):
    def glibc(self, *arguments):
        command = [os.path.join(PROJECT, ".ci/packaging/glibc.sh"), *arguments]
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def test_a_file_that_asks_for_more_is_refused_with_the_symbols(self):
        with tempfile.TemporaryDirectory() as directory:
            program = os.path.join(directory, "program")
            source = "#include <stdio.h>\nint main(void) { puts(\"\"); return 0; }\n"
            subprocess.run(["cc", "-x", "c", "-", "-o", program], input=source, text=True, check=True)
            asks = self.glibc(program)
            self.assertRegex(asks.stdout, r"^2\.\d+(\.\d+)?\n$")
            self.assertEqual(self.glibc("--at-most", asks.stdout.strip(), program).returncode, 0)
            refused = self.glibc("--at-most", "2.0", program)
            self.assertEqual(refused.returncode, 1)
            self.assertRegex(refused.stderr, r"puts wants 2\.\d+")

    def test_a_file_that_is_no_program_is_an_error(self):
        self.assertEqual(self.glibc("--at-most", "2.34", os.path.join(PROJECT, "README.md")).returncode, 1)


class Examples(unittest.TestCase):
    """Every job in docs/examples makes NCCL find Towline, and insists on it."""

    def test_jobs(self):
        folder = os.path.join(PROJECT, "docs/examples")
        jobs = sorted(name for name in os.listdir(folder) if name.endswith((".sh", ".sbatch", ".yaml")))
        self.assertGreaterEqual(len(jobs), 5)
        for name in jobs:
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                text = file.read()
            self.assertNotIn("\t", text, name)
            if name.endswith(".yaml"):
                self.assertRegex(text, r"name: NCCL_NET, value: Towline", name)
                self.assertRegex(text, r"name: LD_LIBRARY_PATH, value: /towline/lib/towline", name)
                self.assertIn("initContainers:", text, name)
            else:
                subprocess.run(["bash", "-n", os.path.join(folder, name)], check=True)
                self.assertTrue(re.search(r'eval "\$\((\S*/)?towline env\)"', text), name)


if __name__ == "__main__":
    unittest.main()
