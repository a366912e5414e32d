#!/usr/bin/env python3
"""nccl-tests' all-to-all whose kernels send by themselves (NCCL's device API) over Towline: every element verified.

Two processes, a GPU each, which NCCL takes for two hosts (NCCL_HOSTID). `alltoall_perf -R 2 -D 3` sends by GIN alone,
`-D 4` by GIN to other hosts and by memory within one. NCCL's proxy carries GIN over Towline's one-sided operations. The same
over NCCL's own sockets stands beside it where that starts (NCCL 2.32 with the gdrdrv module); where not, NCCL's log says why.
With `--examples` NCCL's own examples of GIN run as well, and must find their results right. Exit status 0: over Towline nothing
was wrong, and NCCL's logs say that Towline carried it.

    tests/gpu/device_api.py --tests ~/nccl-tests/build --towline target/release --nccl DIRECTORY_OF_libnccl.so.2
    tests/gpu/device_api.py --examples ~/nccl/docs/examples --towline target/release --nccl DIRECTORY_OF_libnccl.so.2

Needs NCCL 2.30.7 or later, mpirun of Open MPI, and nccl-tests 2.17.4 or later built with `make MPI=1 NCCL_HOME=...` against
that NCCL: earlier ones have no `-D 3`, and one built against an NCCL without a device API refuses it. The examples are part of
NCCL's sources; `make MPI=1 NCCL_HOME=...` in 06_device_api and 07_kernel_fusion builds them.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:0] = [os.path.join(ROOT, "benches", "nccl"), os.path.join(ROOT, "tests", "gpu")]

from one_sided import environment, not_shown, read  # noqa: E402

# Fewer bytes than 64 nccl-tests rounds down to nothing.
RANKS, FIRST, LAST, FACTOR = 2, 64, 16 << 20, 8
SIZES = [FIRST * FACTOR**step for step in range(7)]
EXAMPLES = ("alltoall_gin", "alltoall_hybrid", "rmsnorm_gin", "rmsnorm_hybrid")
# Each rank says which host it is, and logs into a file of its own.
RANK = 'export NCCL_HOSTID=towline-test-host-$OMPI_COMM_WORLD_RANK NCCL_DEBUG_FILE="$1/nccl-rank$OMPI_COMM_WORLD_RANK.log"; shift; exec "$@"'


def arguments():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", help="directory of alltoall_perf")
    parser.add_argument("--examples", metavar="DIRECTORY", help="NCCL's docs/examples, built")
    parser.add_argument("--towline", required=True, help="directory of Towline's libnccl-net.so")
    parser.add_argument("--nccl", help="directory of libnccl.so.2")
    parser.add_argument("--interface", default="lo")
    parser.add_argument("--limit", type=float, default=60, metavar="SECONDS", help="for one run")
    parser.add_argument("--out", help="keep outputs and NCCL's logs here")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for both ranks")
    given = parser.parse_args()
    if not given.tests and not given.examples:
        parser.error("--tests or --examples is needed")
    return given


def results(text):
    """Size -> (microseconds out of place, wrong elements out of place and in place, as written)."""
    found = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 9 and words[0].isdigit() and words[1].isdigit():
            found[int(words[0])] = (float(words[5]), words[8::4][:2])
    return found


def failure(text, code):
    """How a program has failed, or none."""
    if not code:
        return None
    # Behind the failure mpirun has a frame and words of its own.
    lines = text.splitlines()
    words = [line for line in lines if "failure" in line or line.startswith("Failed")] or [line for line in lines if line.strip(" -")]
    return f"exit status {code}: {words[-1] if words else 'without a word'}"


def problem(text, code):
    """What is wrong with a run of nccl-tests, or none."""
    if code:
        return failure(text, code)
    found = results(text)
    if sorted(found) != SIZES:
        return f"sizes {sorted(found)}, not {SIZES}"
    for size, (_, wrong) in found.items():
        # nccl-tests does not check an all-to-all in place.
        if wrong[0] != "0" or wrong[1:] not in ([], ["0"], ["N/A"]):
            return f"{size} bytes: {' and '.join(wrong)} wrong elements"
    return None if "# Out of bounds values : 0 OK" in " ".join(text.split()) else "no clean end"


def problem_of_example(text, code):
    """What is wrong with a run of one of NCCL's examples, or none. A rank on which nothing is wrong need not say so."""
    if code:
        return failure(text, code)
    for line in text.splitlines():
        if any(word in line for word in ("ERROR", "FAILED", "mismatch")):
            return line.strip()
    if text.count("MPI initialized: rank") != RANKS:
        return "it was not built with MPI=1"
    is_right = "result: PASSED" in text or "SUCCESS: Example completed successfully!" in text
    return None if is_right else "it does not say that its result is right"


def found_in(directory, name):
    """The path of a program somewhere below a directory; none where it is not there."""
    for folder, _, names in os.walk(directory):
        if name in names and os.access(os.path.join(folder, name), os.X_OK):
            return os.path.join(folder, name)
    return None


def run(program, life, given, folder):
    """Runs a program on both ranks: its output, its exit status, and why NCCL's logs do not show the life's network or none."""
    os.makedirs(folder, exist_ok=True)
    for name in os.listdir(folder):
        os.unlink(os.path.join(folder, name))
    env = environment(given, 0, folder, life)
    env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    command = ["mpirun", "-np", str(RANKS), "--oversubscribe", "--bind-to", "none", "sh", "-c", RANK, "rank", folder, *program]
    path = os.path.join(folder, "output.txt")
    with open(path, "w", encoding="utf-8") as output:
        job = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = job.wait(given.limit)
        except subprocess.TimeoutExpired:
            code = f"none within {given.limit:.0f} s"
            # The ranks too, or they keep the GPUs.
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    why = None
    for rank in range(RANKS):
        why = why or not_shown(life, read(os.path.join(folder, f"nccl-rank{rank}.log")), 1)
    return read(path), code, why


def all_to_all(life, implementation, given, folder):
    """One run of nccl-tests: its times by size, and what went wrong or none."""
    program = [os.path.join(os.path.abspath(given.tests), "alltoall_perf"), "-b", str(FIRST), "-e", str(LAST), "-f", str(FACTOR)]
    program += ["-n", "5", "-w", "1", "-c", "1", "-R", "2", "-D", str(implementation)]
    text, code, why = run(program, life, given, folder)
    return {size: took for size, (took, _) in results(text).items()}, problem(text, code) or why


def example(name, given, folder):
    """Runs one of NCCL's examples; what went wrong or none."""
    program = found_in(os.path.abspath(given.examples), name)
    if not program:
        return "it has not been built"
    text, code, why = run([program], "towline", given, folder)
    return problem_of_example(text, code) or why


def tell_logs(folder):
    """Prints what NCCL's logs say of networks."""
    for rank in range(RANKS):
        log = read(os.path.join(folder, f"nccl-rank{rank}.log")).splitlines()
        telling = [line for line in log if any(word in line for word in ("WARN", "RMA/", "GIN/", "Towline:"))]
        print("\n".join(telling[-12:]), flush=True)


def main():
    """All runs, and a table."""
    given, good, columns = arguments(), True, {}
    with tempfile.TemporaryDirectory() as scratch:
        out = os.path.abspath(given.out or scratch)
        for life, implementation in (("towline", 3), ("towline", 4), ("socket", 3)) if given.tests else ():
            name = f"{life} -D {implementation}"
            folder = os.path.join(out, name.replace(" ", ""))
            times, why = all_to_all(life, implementation, given, folder)
            if not why:
                columns[name] = times
                print(f"{name}: ok, {len(times)} sizes, 0 wrong", flush=True)
                continue
            if life == "socket":
                print(f"{name}: NCCL's own does not start here: {why}", flush=True)
            else:
                good = False
                print(f"{name}: FAILED: {why}", flush=True)
            tell_logs(folder)
        for name in EXAMPLES if given.examples else ():
            why = example(name, given, os.path.join(out, name))
            print(f"{name}: {'FAILED: ' + why if why else 'ok'}", flush=True)
            if why:
                good = False
                tell_logs(os.path.join(out, name))
    if columns:
        print(f"{'us, bytes':>12}" + "".join(f" {name:>14}" for name in columns))
        for size in SIZES:
            print(f"{size:>12}" + "".join(f" {times[size]:>14.0f}" for times in columns.values()))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
