"""What tests/gpu/flagcx.py makes of FlagCX's logs and times. Runs without a GPU:

python3 -B -m unittest tests/gpu_flagcx_test.py
"""

import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "gpu"))

import flagcx  # noqa: E402

LIFE = """vm:1:1 [0] FLAGCX INFO ADAPTOR/Plugin: Loaded net adaptor plugin 'Towline'
vm:1:1 [0] FLAGCX INFO Using network Towline
vm:1:1 [0] FLAGCX INFO Unloading net adaptor plugin
"""


class Verdicts(unittest.TestCase):
    """What is a failure."""

    def test_the_library_must_have_been_closed_and_opened_again(self):
        self.assertIsNone(flagcx.not_shown("Towline", 2 * LIFE))
        self.assertIn("'Using network Towline' 1 times, not 2", flagcx.not_shown("Towline", LIFE))
        kept = LIFE.replace("Unloading net adaptor plugin", "") + LIFE.replace("Loaded net adaptor plugin 'Towline'", "")
        self.assertIn("'Loaded net adaptor plugin 'Towline'' 1 times", flagcx.not_shown("Towline", kept))
        self.assertIn("0 times", flagcx.not_shown("Towline", 2 * "Using network Socket\n"))
        self.assertIsNone(flagcx.not_shown("Socket", 2 * "FLAGCX INFO Using network SOCKET\n"))
        self.assertIn("0 times", flagcx.not_shown("Socket", 2 * LIFE))

    def test_what_is_slower_is_named(self):
        sockets = {"sendrecv 4096": 1.0, "alltoall 1048576": 2.0}
        self.assertEqual(list(flagcx.slower({"Towline": {"sendrecv 4096": 1.2, "alltoall 1048576": 2.0}, "Socket": sockets})), [])
        named = list(flagcx.slower({"Towline": {"sendrecv 4096": 1.3, "alltoall 1048576": 2.2}, "Socket": sockets}))
        self.assertEqual(
            named,
            [
                "sendrecv 4096 bytes takes 1.30 of the time of FlagCX's Socket adaptor",
                "alltoall 1048576 bytes takes 1.10 of the time of FlagCX's Socket adaptor",
            ],
        )


if __name__ == "__main__":
    unittest.main()
