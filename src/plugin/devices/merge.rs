//! Which devices NCCL may merge into a virtual device.
//!
//! NCCL 2.24 and later request a merge through `makeVDevice` when the members are close enough: by default, when they
//! are ports of one card (`NCCL_NET_MERGE_LEVEL=PORT`). NCCL measures that distance in its tree of PCI devices. It
//! attaches every interface without a PCI path to the first processor, so all of them count as ports of one card. Then
//! it places the merged device beside the members' common PCI parent, which these do not have. So the members are
//! removed, and the merged device is not in the tree. The first collective ends with "Could not find any local path
//! from gpu 0 to net" (`graph/topo.cc`, ncclTopoGetVNicParent; NCCL 2.28.9). VLANs, bonds over virtual NICs, veth,
//! macvlan and ipvlan have no PCI path.
//!
//! NCCL 2.26 and later use the physical devices when a merge is refused, and log that at INFO. NCCL 2.24 and 2.25 end
//! the job, so the interface that they load does not offer merging at all (`abi::v9`).
//!
//! Interfaces stay separate unless the user requests merging: NCCL spreads its channels over two devices, which moves
//! large messages faster than one device of two rails.

use super::Plan;

/// The merges that the user allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MergePolicy {
    /// Interfaces may be merged: `NCCL_NET_FORCE_MERGE` or `NCCL_NET_MERGE_LEVEL` is set.
    pub interfaces: bool,
    /// RDMA ports may be merged: `NCCL_IB_MERGE_NICS` is not 0.
    pub ports: bool,
    /// Anything else may be merged: `TOWLINE_MERGE_ANY=1`.
    pub any: bool,
}

impl MergePolicy {
    /// Why these devices are not merged, in a sentence; `None` when they may be. A single device always may.
    pub(crate) fn refuse(self, plans: &[&Plan]) -> Option<String> {
        if plans.len() < 2 {
            return None;
        }
        let names = || plans.iter().map(|plan| plan.name()).collect::<Vec<_>>().join("+");
        let over_rdma = plans.iter().any(|plan| !plan.ports.is_empty());
        if over_rdma && !self.ports {
            return Some(format!("{} stay separate devices, as NCCL_IB_MERGE_NICS=0 asks", names()));
        }
        if self.any {
            return None;
        }
        if let Some(homeless) = plans.iter().find(|plan| plan.pci_path.is_none()) {
            return Some(format!(
                "{} stay separate devices: {} has no place on the PCI bus, and NCCL cannot use a merged device without one",
                names(),
                homeless.name()
            ));
        }
        (!over_rdma && !self.interfaces).then(|| {
            format!(
                "{} stay separate devices, which is faster; NCCL_NET_FORCE_MERGE or TOWLINE_RAILS joins them",
                names()
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Rail, RdmaPort};
    use super::*;

    fn interface(name: &str, pci: Option<&str>) -> Plan {
        let address = ([10, 0, 0, 1], 0).into();
        let rail =
            Rail { name: name.into(), index: 1, address, speed_mbps: 10_000, speed_is_known: true, running: true };
        let pci_path = pci.map(|path| std::ffi::CString::new(path).expect("a path"));
        Plan { rails: vec![rail], ports: Vec::new(), pci_path, guid: 1, port: 0 }
    }

    fn port(name: &str, pci: Option<&str>) -> Plan {
        let (name, speed_mbps, ptr_support, max_comms) = (name.into(), 100_000, 1, 1000);
        let port =
            RdmaPort { place: 0, name, speed_mbps, ptr_support, max_comms, is_infiniband: false, rail: -1, plane: -1 };
        Plan { ports: vec![port], ..interface("eth0", pci) }
    }

    const DEFAULT: MergePolicy = MergePolicy { interfaces: false, ports: true, any: false };
    const CARD: [Option<&str>; 2] = [Some("/sys/devices/0000:17:00.0"), Some("/sys/devices/0000:17:00.1")];

    #[test]
    fn devices_without_a_pci_path_are_never_merged_whatever_the_user_asks_of_nccl() {
        let asked = MergePolicy { interfaces: true, ..DEFAULT };
        for policy in [DEFAULT, asked] {
            for (one, other) in [(None, None), (CARD[0], None), (None, CARD[1])] {
                let (a, b) = (interface("eth0", one), interface("vlan7", other));
                let why = policy.refuse(&[&a, &b]).expect("refused");
                assert!(why.contains("no place on the PCI bus") && why.contains("eth0+vlan7"), "{why}");
                let (a, b) = (port("rxe0", one), port("rxe1", other));
                assert!(policy.refuse(&[&a, &b]).is_some());
            }
        }
    }

    #[test]
    fn ports_of_one_card_are_merged_over_rdma_and_interfaces_only_when_asked() {
        let (a, b) = (interface("eth0", CARD[0]), interface("eth1", CARD[1]));
        assert!(DEFAULT.refuse(&[&a, &b]).expect("refused").contains("NCCL_NET_FORCE_MERGE"));
        assert_eq!(MergePolicy { interfaces: true, ..DEFAULT }.refuse(&[&a, &b]), None);
        let (a, b) = (port("mlx5_0", CARD[0]), port("mlx5_1", CARD[1]));
        assert_eq!(DEFAULT.refuse(&[&a, &b]), None);
        let apart = MergePolicy { ports: false, ..DEFAULT };
        assert!(apart.refuse(&[&a, &b]).expect("refused").contains("NCCL_IB_MERGE_NICS=0"));
    }

    #[test]
    fn a_device_by_itself_needs_no_place_and_a_test_may_merge_anything() {
        assert_eq!(DEFAULT.refuse(&[&interface("veth0", None)]), None);
        let any = MergePolicy { any: true, ..DEFAULT };
        assert_eq!(any.refuse(&[&interface("veth0", None), &interface("veth1", None)]), None);
    }
}
