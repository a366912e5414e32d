//! The numbering of devices: physical ones first, virtual ones behind them, across reloads.

use super::{DeviceProperties, MAX_MEMBERS, MergePolicy, Plan, Rail, RdmaPort, stable_hash};
use crate::os::error::{Error, Result};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The devices of the process. The module above lists what NCCL relies on.
#[derive(Debug)]
pub(crate) struct Table(Mutex<State>);

#[derive(Debug)]
struct State {
    /// Physical devices, then virtual ones.
    devices: Vec<Device>,
    /// How many of them are physical.
    physical: usize,
    /// The devices that the next count makes valid, if NCCL reads it.
    loaded: Option<Vec<Plan>>,
    /// The virtual devices are of an earlier load: not counted, and dropped when a new one is made.
    stale: bool,
    /// Every set of properties that was ever handed out. Never freed, each kept once.
    given: Vec<&'static DeviceProperties>,
}

#[derive(Debug, Clone)]
struct Device {
    properties: &'static DeviceProperties,
    plan: Plan,
    binding: Binding,
}

/// The interfaces or ports to which a backend binds for a device.
#[derive(Debug, Clone)]
pub(crate) struct Binding {
    /// The rails; with ports, those of the control channels.
    pub rails: Arc<[Rail]>,
    /// The places of the RDMA ports that carry the data; none when the rails do.
    pub ports: Arc<[usize]>,
}

impl Binding {
    /// Whether RDMA ports carry the data.
    pub(crate) fn is_rdma(&self) -> bool {
        !self.ports.is_empty()
    }
}

impl Plan {
    fn binding(&self) -> Binding {
        Binding { rails: self.rails.clone().into(), ports: self.ports.iter().map(|port| port.place).collect() }
    }
}

impl Table {
    /// A table without devices.
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(State { devices: Vec::new(), physical: 0, loaded: None, stale: false, given: Vec::new() }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code under the lock leaves a half-changed state, so a panic elsewhere does no harm.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notifies the table that the plugin may have been loaded again, with these physical devices: for the first `init`
    /// of a load. That is every `init` of the interfaces up to v10, and from v11 on every `init` while no other context
    /// exists.
    pub(crate) fn load(&self, plans: Vec<Plan>) {
        let mut state = self.state();
        state.loaded = Some(plans);
        if state.devices.is_empty() {
            state.take_loaded();
        } else {
            state.bind_stand_ins();
        }
    }

    /// How many devices there are, for NCCL's `devices`.
    pub(crate) fn count(&self) -> usize {
        let mut state = self.state();
        state.take_loaded();
        if state.stale { state.physical } else { state.devices.len() }
    }

    /// The properties of a device for NCCL.
    ///
    /// # Errors
    /// When there is no device of this number.
    pub(crate) fn properties(&self, number: i32) -> Result<&'static DeviceProperties> {
        Ok(self.state().device(number)?.properties)
    }

    /// The interfaces or ports to which a backend binds for this device.
    ///
    /// # Errors
    /// When there is no device of this number.
    pub(crate) fn binding(&self, number: i32) -> Result<Binding> {
        Ok(self.state().device(number)?.binding.clone())
    }

    /// The number of the virtual device that is made of these physical devices.
    ///
    /// # Errors
    /// When a member is not a physical device, or is listed twice, or there are none or more than [`MAX_MEMBERS`], or
    /// when they are RDMA ports of different networks. `Ok(Err(why))`: they must stay separate, and NCCL uses them as
    /// they are.
    pub(crate) fn make_vdevice(
        &self,
        members: &[i32],
        policy: MergePolicy,
    ) -> Result<std::result::Result<i32, String>> {
        let mut state = self.state();
        state.take_loaded();
        let plan = match state.merged(members, policy)? {
            Ok(plan) => plan,
            Err(why) => return Ok(Err(why)),
        };
        if state.stale {
            let physical = state.physical;
            state.devices.truncate(physical);
            state.stale = false;
        }
        let same = |device: &Device| device.properties.members == members;
        let position = match state.devices[state.physical..].iter().position(same) {
            Some(position) => state.physical + position,
            None => {
                state.add(plan, members.to_vec());
                state.devices.len() - 1
            }
        };
        Ok(Ok(number(position)))
    }
}

impl Default for Table {
    fn default() -> Self {
        Self::new()
    }
}

fn number(position: usize) -> i32 {
    i32::try_from(position).expect("far fewer devices than that")
}

impl State {
    /// Makes the devices that were loaded last valid.
    fn take_loaded(&mut self) {
        let Some(plans) = self.loaded.take() else { return };
        self.stale = true;
        if self.devices[..self.physical].iter().map(|device| &device.plan).eq(&plans) {
            return;
        }
        self.devices.clear();
        self.physical = plans.len();
        for (position, plan) in plans.into_iter().enumerate() {
            self.add(plan, vec![number(position)]);
        }
    }

    /// NCCL may have counted a stand-in, and not count again: it connects over the first device that was loaded. Its
    /// name and properties stay, since another communicator may be looking them up.
    fn bind_stand_ins(&mut self) {
        let Some(first) = self.loaded.as_ref().and_then(|plans| plans.first()) else { return };
        for device in self.devices.iter_mut().filter(|device| device.plan.is_stand_in()) {
            device.binding = first.binding();
        }
    }

    fn device(&self, number: i32) -> Result<&Device> {
        let found = usize::try_from(number).ok().and_then(|position| self.devices.get(position));
        found.ok_or_else(|| Error::argument(format!("there is no device {number}, only {}", self.devices.len())))
    }

    fn add(&mut self, plan: Plan, members: Vec<i32>) {
        let properties = plan.properties(members);
        let known = self.given.iter().copied().find(|given| **given == properties);
        let properties = known.unwrap_or_else(|| {
            let kept: &'static DeviceProperties = Box::leak(Box::new(properties));
            self.given.push(kept);
            kept
        });
        let binding = plan.binding();
        self.devices.push(Device { properties, plan, binding });
    }

    /// The plan of a device made of these members, or why they stay separate.
    fn merged(&self, members: &[i32], policy: MergePolicy) -> Result<std::result::Result<Plan, String>> {
        if members.is_empty() || members.len() > MAX_MEMBERS {
            let what =
                format!("a virtual device of {} members was asked for, 1 to {MAX_MEMBERS} are possible", members.len());
            return Err(Error::usage(what));
        }
        let mut plans = Vec::with_capacity(members.len());
        for (index, &member) in members.iter().enumerate() {
            if members[..index].contains(&member) {
                return Err(Error::usage(format!("a virtual device was asked for with device {member} in it twice")));
            }
            let device = self.device(member)?;
            if usize::try_from(member).is_ok_and(|position| position >= self.physical) {
                let what =
                    format!("a virtual device was asked for with device {member} in it, which is virtual itself");
                return Err(Error::usage(what));
            }
            plans.push(&device.plan);
        }
        let ports = || plans.iter().flat_map(|plan| &plan.ports);
        if let Some(first) = ports().next()
            && let Some(other) = ports().find(|port| port.is_infiniband != first.is_infiniband)
        {
            let network = |port: &RdmaPort| if port.is_infiniband { "InfiniBand" } else { "Ethernet" };
            return Err(Error::usage(format!(
                "a virtual device was asked for of ports of different networks: {} on {} and {} on {}",
                first.name,
                network(first),
                other.name,
                network(other)
            ))
            .with_hint("choose ports of one network with NCCL_IB_HCA"));
        }
        if let Some(why) = policy.refuse(&plans) {
            return Ok(Err(why));
        }
        let guids: Vec<u8> = plans.iter().flat_map(|plan| plan.guid.to_le_bytes()).collect();
        // Ports share the interfaces of their control channels.
        let all_rails = plans.iter().flat_map(|plan| plan.rails.iter().cloned());
        Ok(Ok(Plan {
            rails: if plans[0].ports.is_empty() { all_rails.collect() } else { plans[0].rails.clone() },
            ports: plans.iter().flat_map(|plan| plan.ports.iter().cloned()).collect(),
            pci_path: plans[0].pci_path.clone(),
            guid: stable_hash(&guids),
            port: plans[0].port,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::error::Cause;
    use proptest::prelude::*;
    use std::net::{Ipv4Addr, SocketAddr};

    fn plan(name: &str, speed_mbps: u32) -> Plan {
        let address = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0);
        let rail = Rail { name: name.into(), index: 1, address, speed_mbps, speed_is_known: true, running: true };
        Plan { rails: vec![rail], ports: Vec::new(), pci_path: None, guid: stable_hash(name.as_bytes()), port: 0 }
    }

    fn plans(count: usize) -> Vec<Plan> {
        (0..count).map(|index| plan(&format!("eth{index}"), 10_000)).collect()
    }

    fn loaded(count: usize) -> Table {
        let table = Table::new();
        table.load(plans(count));
        table
    }

    const ANY: MergePolicy = MergePolicy { interfaces: true, ports: true, any: true };

    fn make(table: &Table, members: &[i32]) -> Result<i32> {
        table.make_vdevice(members, ANY).map(|made| made.expect("anything may be merged"))
    }

    #[test]
    fn a_merge_that_nccl_could_not_place_is_refused_and_changes_nothing() {
        let table = loaded(4);
        let policy = MergePolicy { any: false, ..ANY };
        for members in [&[0, 1][..], &[0, 1, 2, 3]] {
            let refused = table.make_vdevice(members, policy).expect("known devices").expect_err("no PCI path");
            assert!(refused.contains("no place on the PCI bus"), "{refused}");
        }
        assert_eq!(table.make_vdevice(&[2], policy).expect("known"), Ok(4), "NCCL 2.24 asks for devices of one member");
        assert_eq!(table.count(), 5);
    }

    fn name(table: &Table, number: i32) -> String {
        table.properties(number).expect("a device").name.to_str().expect("text").to_owned()
    }

    #[test]
    fn physical_devices_are_members_of_themselves() {
        let table = loaded(2);
        assert_eq!(table.count(), 2);
        for number in 0..2 {
            let properties = table.properties(number).expect("a device");
            assert_eq!(properties.members, [number]);
            assert_eq!((properties.max_recvs, properties.max_multi_request), (8, 1));
            assert_eq!((properties.rail, properties.plane, properties.ptr_support), (-1, -1, 1));
            assert_eq!((properties.max_p2p_bytes, properties.max_coll_bytes), (1 << 40, 1 << 40));
            assert_eq!(table.binding(number).expect("rails").rails.len(), 1);
        }
    }

    #[test]
    fn a_virtual_device_joins_names_rails_and_speeds_and_is_counted_after_the_physical() {
        let table = loaded(3);
        assert_eq!(make(&table, &[0, 2]).expect("a device"), 3);
        assert_eq!(table.count(), 4);
        let merged = table.properties(3).expect("a device");
        assert_eq!((name(&table, 3).as_str(), merged.speed_mbps), ("eth0+eth2", 20_000));
        assert_eq!(merged.members, [0, 2]);
        assert!((0..3).all(|one| table.properties(one).expect("a device").guid != merged.guid));
        let rails = table.binding(3).expect("rails").rails;
        assert_eq!(rails.iter().map(|rail| rail.name.as_str()).collect::<Vec<_>>(), ["eth0", "eth2"]);
        assert_eq!(make(&table, &[0, 2]).expect("a device"), 3, "the same members, the same device");
        assert_eq!(make(&table, &[2, 0]).expect("a device"), 4, "the order of rails counts");
    }

    #[test]
    fn wrong_members_are_refused_and_change_nothing() {
        let table = loaded(9);
        assert_eq!(make(&table, &[0, 1]).expect("a device"), 9);
        let nine: Vec<i32> = (0..9).collect();
        for (members, cause) in [
            (&[][..], Cause::Usage),
            (&[0, 0], Cause::Usage),
            (&[0, 9], Cause::Usage),
            (&[0, 10], Cause::Argument),
            (&[-1], Cause::Argument),
            (&nine, Cause::Usage),
        ] {
            assert_eq!(make(&table, members).expect_err("refused").cause(), cause, "{members:?}");
        }
        assert_eq!(table.count(), 10);
        assert_eq!(table.properties(10).expect_err("no such device").cause(), Cause::Argument);
        assert_eq!(table.binding(i32::MIN).expect_err("no such device").cause(), Cause::Argument);
    }

    /// Devices of one RDMA port each: whether it is on InfiniBand, its rail and its plane.
    fn ports(of: &[(bool, i16, i16)]) -> Table {
        let port = |(place, &(is_infiniband, rail, plane)): (usize, &(bool, i16, i16))| {
            let name = format!("mlx5_{place}");
            let (speed_mbps, ptr_support, max_comms) = (100_000, 1, 1000);
            let port = RdmaPort { place, name, speed_mbps, ptr_support, max_comms, is_infiniband, rail, plane };
            Plan { ports: vec![port], ..plan("eth0", 10_000) }
        };
        let table = Table::new();
        table.load(of.iter().enumerate().map(port).collect());
        table
    }

    #[test]
    fn ports_of_different_networks_are_not_fused() {
        let table = ports(&[(true, -1, -1), (false, -1, -1), (true, -1, -1), (false, -1, -1)]);
        for members in [&[0, 1][..], &[3, 2], &[0, 2, 1], &[1, 3, 0]] {
            let refused = make(&table, members).expect_err("refused");
            assert_eq!(refused.cause(), Cause::Usage, "{members:?}");
            assert!(refused.to_string().contains("NCCL_IB_HCA"), "{refused}");
        }
        let refused = make(&table, &[0, 1]).expect_err("refused").to_string();
        assert!(refused.contains("mlx5_0 on InfiniBand and mlx5_1 on Ethernet"), "{refused}");
        for members in [[0, 2], [1, 3]] {
            assert!(make(&table, &members).is_ok(), "{members:?}");
        }
    }

    #[test]
    fn a_fused_device_has_the_rail_of_all_its_ports_or_none_and_no_single_plane() {
        let table = ports(&[(true, 1, 0), (true, 1, 1), (true, 2, 0), (true, -1, 0)]);
        let of = |members: &[i32]| {
            let made = make(&table, members).expect("a device");
            let properties = table.properties(made).expect("a device");
            (properties.rail, properties.plane)
        };
        assert_eq!(of(&[1]), (1, 1));
        assert_eq!(of(&[0, 1]), (1, -1));
        for members in [&[0, 2][..], &[0, 3], &[3, 0], &[0, 1, 2], &[2, 0, 1]] {
            assert_eq!(of(members), (-1, -1), "{members:?}");
        }
    }

    #[test]
    fn after_a_reload_only_physical_devices_are_counted_and_new_virtual_ones_follow_them() {
        let table = loaded(3);
        make(&table, &[0, 1]).expect("a device");
        make(&table, &[1, 2]).expect("a device");
        table.load(plans(3));
        assert_eq!(table.count(), 3);
        assert_eq!(make(&table, &[1, 2]).expect("a device"), 3);
        assert_eq!((table.count(), name(&table, 3).as_str()), (4, "eth1+eth2"));
    }

    #[test]
    fn a_plugin_that_was_kept_keeps_its_numbers() {
        let table = loaded(2);
        let merged = make(&table, &[0, 1]).expect("a device");
        // Initialised again without a new load: NCCL does not read the count, and looks its virtual device up as
        // before.
        table.load(plans(1));
        assert_eq!(name(&table, merged), "eth0+eth1");
        assert_eq!(name(&table, 1), "eth1");
    }

    #[test]
    fn other_interfaces_after_a_reload_are_seen_with_the_next_count() {
        let table = loaded(2);
        make(&table, &[0, 1]).expect("a device");
        table.load(vec![plan("ib0", 100_000)]);
        assert_eq!((table.count(), name(&table, 0).as_str()), (1, "ib0"));
        assert!(table.properties(1).is_err());
    }

    #[test]
    fn a_stand_in_connects_over_the_first_device_that_is_loaded_and_is_replaced_with_the_next_count() {
        let table = Table::new();
        table.load(vec![Plan::stand_in()]);
        let virtual_one = make(&table, &[0]).expect("NCCL 2.24 asks for devices of one member");
        let rails = |number| table.binding(number).expect("a device").rails.len();
        assert_eq!((table.count(), rails(0), rails(virtual_one)), (2, 0, 0));
        table.load(plans(2));
        assert_eq!((rails(0), rails(virtual_one)), (1, 1));
        assert_eq!(name(&table, 0), "none", "NCCL may be looking it up");
        assert!(table.properties(2).is_err(), "nor is there another device than NCCL counted");
        assert_eq!((table.count(), name(&table, 0).as_str(), name(&table, 1).as_str()), (2, "eth0", "eth1"));
        table.load(vec![Plan::stand_in()]);
        assert_eq!((name(&table, 0).as_str(), rails(0)), ("eth0", 1), "devices stay until they are counted");
    }

    #[test]
    fn ten_thousand_reloads_keep_one_copy_of_each_set_of_properties() {
        let table = loaded(2);
        let (first, merged) = (table.properties(0).expect("a device"), make(&table, &[0, 1]).expect("a device"));
        for round in 0..10_000 {
            table.load(plans(1 + round % 2));
            table.count();
            if round % 2 == 1 {
                assert_eq!(make(&table, &[0, 1]).expect("a device"), merged);
            }
        }
        assert!(std::ptr::eq(first, table.properties(0).expect("a device")));
        assert_eq!(table.state().given.len(), 3);
    }

    proptest! {
        #[test]
        fn whatever_members_are_asked_for_every_counted_device_is_whole(
            asks in prop::collection::vec(prop::collection::vec(-2i32..12, 0..10), 0..12),
        ) {
            let table = loaded(6);
            for members in &asks {
                if let Ok(number) = make(&table, members) {
                    prop_assert_eq!(&table.properties(number).expect("just made").members, members);
                }
            }
            for number in 0..i32::try_from(table.count()).expect("few") {
                let properties = table.properties(number).expect("counted");
                prop_assert_eq!(properties.members.len(), table.binding(number).expect("counted").rails.len());
                prop_assert!(properties.members.iter().all(|member| (0..6).contains(member)));
            }
        }
    }
}
