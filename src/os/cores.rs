//! How many processors a process has, and how many it shares with the others of its host or container.

use std::fs;
use std::mem::MaybeUninit;
use std::path::Path;

/// Processors, counted in three ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cores {
    /// What this process may use: its affinity, and no more than the quota of its container.
    pub usable: usize,
    /// Those of its affinity mask: the ones a launcher assigned to it, or all.
    pub bound: usize,
    /// What all processes of the host or the container have together.
    pub shared: usize,
}

impl Cores {
    /// As reported by the kernel.
    pub(crate) fn of_this_process() -> Self {
        let usable = std::thread::available_parallelism().map_or(1, usize::from);
        let bound = affinity().unwrap_or(usable).max(usable);
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let shared = cpuset(&groups, Path::new("/sys/fs/cgroup")).or_else(online).unwrap_or(bound).max(bound);
        // If there are fewer than in the affinity mask, this is a quota, which all processes share.
        Self { usable, bound, shared: if usable < bound { shared.min(usable) } else { shared } }
    }

    /// The processors that one of `processes` on this host may use alone. Each process gets an equal part of all, or,
    /// if it is bound to fewer, those: they are its own, or it shares them only with its neighbours.
    pub(crate) fn of_one_in(self, processes: usize) -> usize {
        (self.shared / processes.max(1)).min(self.bound).max(1)
    }

    /// Those that this process does not share with others of its job.
    pub(crate) fn own(self) -> usize {
        self.of_one_in(local_processes(|name| std::env::var(name).ok()))
    }
}

/// How many processes of this job the launcher has started on this host, if one of its `variables` gives it.
fn local_processes(variables: impl Fn(&str) -> Option<String>) -> usize {
    const SAID_BY: [&str; 8] = [
        "LOCAL_WORLD_SIZE",           // torchrun
        "OMPI_COMM_WORLD_LOCAL_SIZE", // Open MPI
        "MPI_LOCALNRANKS",            // MPICH and its relatives
        "MV2_COMM_WORLD_LOCAL_SIZE",  // MVAPICH
        "PMI_LOCAL_SIZE",             // PMI
        "LOCAL_SIZE",                 // DeepSpeed
        "HOROVOD_LOCAL_SIZE",         // Horovod
        "SLURM_STEP_TASKS_PER_NODE",  // Slurm
    ];
    SAID_BY.iter().find_map(|name| most_tasks(&variables(name)?)).unwrap_or(1)
}

/// The largest number of a list as Slurm writes it, `8(x2),4` for two hosts with eight tasks and one with four, or the
/// single number that others write. The list does not show which entry is this host's.
fn most_tasks(list: &str) -> Option<usize> {
    let numbers = list.split(',').map(|entry| entry.split('(').next().unwrap_or(entry).trim().parse().ok());
    numbers.collect::<Option<Vec<usize>>>()?.into_iter().max()
}

/// The processors that this thread may run on (sched_getaffinity(2)).
fn affinity() -> Option<usize> {
    let mut set = MaybeUninit::<libc::cpu_set_t>::zeroed();
    // SAFETY: the kernel writes at most the length that is passed; a mask of zeroes is a valid one.
    let known = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), set.as_mut_ptr()) } == 0;
    // SAFETY: as above, and only the bits that were filled are read.
    known.then(|| unsafe { libc::CPU_COUNT(set.assume_init_ref()) } as usize)
}

/// The processors of the machine that are online.
fn online() -> Option<usize> {
    // SAFETY: plain system call.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }).ok().filter(|count| *count > 0)
}

/// The processors of the control group with these `groups` (`/proc/self/cgroup`), or of the nearest one above it that
/// has the file (cgroups(7)). The path may be that of the host, while only the container's own part is mounted.
fn cpuset(groups: &str, mounted: &Path) -> Option<usize> {
    groups.lines().find_map(|line| {
        let (_, line) = line.split_once(':')?;
        let (controllers, path) = line.split_once(':')?;
        let (hierarchy, file) = match controllers {
            "" => ("", "cpuset.cpus.effective"),
            _ if controllers.split(',').any(|name| name == "cpuset") => ("cpuset", "cpuset.effective_cpus"),
            _ => return None,
        };
        let of = |group: &Path| {
            let group = group.strip_prefix("/").unwrap_or(group);
            count(&fs::read_to_string(mounted.join(hierarchy).join(group).join(file)).ok()?)
        };
        Path::new(path).ancestors().find_map(of)
    })
}

/// The processors of a list as the kernel writes it: `0-3,8,10-11`.
fn count(list: &str) -> Option<usize> {
    let of = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        (last >= first).then(|| last - first + 1)
    };
    list.trim().split(',').map(of).sum::<Option<usize>>().filter(|count| *count > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchers_say_how_many_processes_there_are() {
        let said = |set: &[(&str, &str)]| {
            local_processes(|name| set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
        };
        assert_eq!(said(&[]), 1);
        assert_eq!(said(&[("LOCAL_SIZE", "4")]), 4);
        assert_eq!(said(&[("SLURM_STEP_TASKS_PER_NODE", "8(x2),4")]), 8);
        assert_eq!(said(&[("LOCAL_WORLD_SIZE", "2"), ("SLURM_STEP_TASKS_PER_NODE", "1(x16)")]), 2);
        assert_eq!(
            said(&[("LOCAL_WORLD_SIZE", "many"), ("PMI_LOCAL_SIZE", "3")]),
            3,
            "what cannot be read is passed over"
        );
    }

    #[test]
    fn this_process_has_some_and_no_more_than_there_are() {
        let cores = Cores::of_this_process();
        assert!(cores.usable >= 1 && cores.usable <= cores.bound, "{cores:?}");
        assert!(cores.of_one_in(1) >= 1 && cores.of_one_in(1) <= cores.bound, "{cores:?}");
    }

    #[test]
    fn who_is_bound_has_what_it_is_bound_to_and_who_is_not_its_part() {
        let of = |usable, bound, shared, processes| Cores { usable, bound, shared }.of_one_in(processes);
        assert_eq!(of(64, 64, 64, 8), 8, "not bound");
        assert_eq!(of(8, 8, 64, 8), 8, "each bound to its own");
        assert_eq!(of(32, 32, 64, 8), 8, "bound to a socket, with three others");
        assert_eq!(of(16, 128, 16, 8), 2, "a container with a quota");
        assert_eq!(of(1, 1, 64, 2), 1);
        assert_eq!([of(4, 4, 4, 8), of(4, 4, 4, 0)], [1, 4]);
    }

    #[test]
    fn lists_are_counted() {
        assert_eq!(["0", "0-3", "0-3,8,10-11\n", "7,9"].map(count), [Some(1), Some(4), Some(7), Some(2)]);
        assert_eq!(["", "\n", "x", "3-1", "1-"].map(count), [None; 5]);
    }

    #[test]
    fn the_nearest_group_that_tells_counts_of_either_version() {
        let mounted = tempfile::tempdir().expect("a folder");
        let write = |path: &str, list: &str| {
            let path = mounted.path().join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("made");
            fs::write(path, list).expect("written");
        };
        let of = |groups: &str| cpuset(groups, mounted.path());
        assert_eq!(of("0::/job/step\n"), None);
        write("job/cpuset.cpus.effective", "0-15\n");
        assert_eq!(of("0::/job/step\n"), Some(16));
        write("job/step/cpuset.cpus.effective", "0-7\n");
        assert_eq!(of("0::/job/step\n"), Some(8));
        write("cpuset/cpuset.effective_cpus", "0-3\n");
        assert_eq!(of("4:cpu,cpuacct:/x\n3:cpuset:/docker/0123\n0::/\n"), Some(4), "the path is the host's");
        assert_eq!(of("nonsense\n0::/job/step"), Some(8));
    }
}
