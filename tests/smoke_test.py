"""What benches/smoke.py promises: it passes a good plugin, tries again, and fails a slow or broken one.

Runs against a stand-in for the program:  python3 -B -m unittest tests/smoke_test.py
"""

import os
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# Writes the report that towline writes. RATIOS are the plugin's results, one per run, the last one for ever.
FAKE = """#!{python}
import json, os, sys
if "--compare" not in sys.argv:
    print("NET INFO NET/Towline: up to 4 streams per connection, 1 worker threads when needed, recovery on")
    sys.exit(0)
words = [word for word in sys.argv[2:] if word != "--compare"]
given = dict(zip(words[::2], words[1::2]))
if given["--sockets"] != ("1" if int(given["-b"]) <= 65536 else "3"):
    sys.exit("plain TCP must have as many sockets as the plugin")
counter = os.environ["COUNTER"]
run = len(open(counter).read()) if os.path.exists(counter) else 0
open(counter, "a").write(".")
ratios = os.environ["RATIOS"].split()
if ratios[min(run, len(ratios) - 1)] == "broken":
    sys.exit("the plugin is broken")
ratio = float(ratios[min(run, len(ratios) - 1)])
row = {{"size": int(given["-b"]), "plugin": {{"bandwidth_gbs": [0.0, ratio * 2, 99.0]}}, "raw_tcp": {{"bandwidth_gbs": [2.0]}}}}
json.dump({{"results": [row]}}, open(given["--json"], "w"))
"""


class Smoke(unittest.TestCase):
    def run_with(self, ratios):
        with tempfile.TemporaryDirectory() as directory:
            fake, counter = os.path.join(directory, "towline"), os.path.join(directory, "counter")
            with open(fake, "w", encoding="utf-8") as file:
                file.write(FAKE.format(python=sys.executable))
            os.chmod(fake, 0o755)
            command = [sys.executable, "-B", os.path.join(ROOT, "benches", "smoke.py"), fake]
            environment = {**os.environ, "RATIOS": ratios, "COUNTER": counter}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            with open(counter, encoding="utf-8") as file:
                return done, len(file.read())

    def test_a_good_plugin_passes_at_once_by_its_median(self):
        done, runs = self.run_with("0.71")
        self.assertEqual((done.returncode, runs), (0, 4), done.stderr)

    def test_a_size_that_falls_short_is_tried_again(self):
        done, runs = self.run_with("0.9 0.5 0.5 0.9")
        self.assertEqual((done.returncode, runs), (0, 6), done.stderr)

    def test_a_slow_plugin_fails_and_the_sizes_are_named(self):
        done, runs = self.run_with("0.69")
        self.assertEqual((done.returncode, runs), (1, 16))
        self.assertIn("attempts: 262144, 2097152, 16777216 B", done.stderr)

    def test_a_failed_run_fails_the_benchmark(self):
        done, runs = self.run_with("broken")
        self.assertEqual((done.returncode, runs), (1, 1))
        self.assertIn("the plugin is broken", done.stderr)


if __name__ == "__main__":
    unittest.main()
