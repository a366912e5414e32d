//! Plays NCCL's choice of devices: which ones it merges, and which of those that remain a GPU can reach.
//!
//! A plugin can pass every other test and still end each job at its first collective, because NCCL drops the members of
//! a merged device and then finds no place for it. So this follows `graph/topo.cc` of NCCL 2.26 to 2.30
//! (ncclTopoGetPath, ncclTopoAutoMerge, ncclTopoMakeVnic, ncclTopoGetLocal) as far as devices go, with NCCL's default
//! merge level: ports of one card. 2.24 and 2.25 differ in one point: a refused merge ends the job.

use towline::host::{ApiVersion, Code, Context, Properties, Result};

/// The devices that NCCL would use, in its order: those that a GPU can reach, and of these the ones of the highest
/// speed.
///
/// # Errors
/// What ends a job: a refused merge before v10 of the interface, and [`Code::Unplaced`] when no device is left.
pub(crate) fn select(context: &Context) -> Result<Vec<i32>> {
    let physical = (0..context.devices()?).map(|dev| context.properties(dev)).collect::<Result<Vec<_>>>()?;
    let apart = merge(&physical, |members| match context.make_vdevice(members) {
        Ok(_) => Ok(Merged::Made),
        // A plugin without the call, or an interface without it: NCCL uses the physical devices.
        Err(Code::NotOffered(_)) => Ok(Merged::Refused),
        Err(code) if context.net().version() == ApiVersion::V9 => Err(code),
        Err(_) => Ok(Merged::Refused),
    })?;
    // NCCL reads the number of devices again: the virtual ones follow the physical.
    let all = (0..context.devices()?).map(|dev| Ok((dev, context.properties(dev)?))).collect::<Result<Vec<_>>>()?;
    let reachable = |(dev, properties): &(i32, Properties)| {
        let position = usize::try_from(*dev).unwrap_or(usize::MAX);
        match apart.get(position) {
            Some(kept) => *kept,
            None => properties.members.iter().all(|member| {
                let member = usize::try_from(*member).ok().and_then(|member| physical.get(member));
                member.is_some_and(|member| member.pci_path.is_some())
            }),
        }
    };
    let usable: Vec<_> = all.iter().filter(|one| reachable(one)).collect();
    let fastest = usable.iter().map(|(_, properties)| properties.speed_mbps).max().ok_or(Code::Unplaced)?;
    Ok(usable.iter().filter(|(_, properties)| properties.speed_mbps == fastest).map(|(dev, _)| *dev).collect())
}

/// The result of a merge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Merged {
    Made,
    Refused,
}

/// Merges what NCCL would merge. Returns for each physical device whether it stays separate.
fn merge(physical: &[Properties], mut make: impl FnMut(&[i32]) -> Result<Merged>) -> Result<Vec<bool>> {
    let count = physical.len();
    let mut near: Vec<Vec<bool>> =
        physical.iter().map(|one| physical.iter().map(|other| is_one_card(one, other)).collect()).collect();
    let (mut placed, mut kept) = (vec![false; count], vec![true; count]);
    let mut root = 0;
    while root < count {
        if placed[root] {
            root += 1;
            continue;
        }
        let group: Vec<usize> =
            std::iter::once(root).chain((0..count).filter(|&at| at != root && !placed[at] && near[root][at])).collect();
        group.iter().for_each(|&at| placed[at] = true);
        if group.len() > 1 {
            let members: Vec<i32> = group.iter().map(|&at| i32::try_from(at).unwrap_or(i32::MAX)).collect();
            if make(&members)? == Merged::Made {
                group.iter().for_each(|&at| kept[at] = false);
            } else {
                // Marked as far from each other, and tried again from the beginning.
                for &at in &group[1..] {
                    placed[at] = false;
                    (near[root][at], near[at][root]) = (false, false);
                }
                root = 0;
                continue;
            }
        }
        root += 1;
    }
    Ok(kept)
}

/// Whether NCCL takes two devices for ports of one card: their PCI functions differ in the last character only, or
/// neither has one, because then both hang below the first processor.
fn is_one_card(one: &Properties, other: &Properties) -> bool {
    let card = |properties: &Properties| {
        let function = properties.pci_path.as_deref()?.rsplit('/').next()?.to_owned();
        Some(function[..function.len().saturating_sub(1)].to_owned())
    };
    card(one) == card(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(pci: Option<&str>) -> Properties {
        Properties { pci_path: pci.map(|pci| format!("/sys/devices/pci0000:00/{pci}")), ..Properties::default() }
    }

    fn merged(pci: &[Option<&str>], refuse: bool) -> (Vec<Vec<i32>>, Vec<bool>) {
        let devices: Vec<_> = pci.iter().map(|pci| device(*pci)).collect();
        let mut asked = Vec::new();
        let kept = merge(&devices, |members| {
            asked.push(members.to_vec());
            Ok(if refuse { Merged::Refused } else { Merged::Made })
        });
        (asked, kept.expect("no error"))
    }

    #[test]
    fn nccl_merges_ports_of_one_card_and_everything_without_a_place() {
        let (asked, kept) = merged(&[Some("0000:17:00.0"), Some("0000:17:00.1"), Some("0000:5e:00.0")], false);
        assert_eq!((asked, kept), (vec![vec![0, 1]], vec![false, false, true]));
        let (asked, kept) = merged(&[None, Some("0000:17:00.0"), None, None], false);
        assert_eq!((asked, kept), (vec![vec![0, 2, 3]], vec![false, true, false, false]));
    }

    #[test]
    fn a_refusal_ends_with_every_device_by_itself() {
        for count in 2..=8 {
            let (asked, kept) = merged(&vec![None; count], true);
            assert_eq!(kept, vec![true; count]);
            assert!(asked.len() <= count, "{asked:?}");
        }
    }
}
