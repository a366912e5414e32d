//! The diagnosis as text.

use super::super::output::Output;
use super::super::table::Table;
use super::limits::Limit;
use super::{Diagnosis, Severity};

fn or_unknown<T: ToString>(value: Option<T>) -> String {
    value.map_or("-".to_owned(), |value| value.to_string())
}

/// A table below a heading, with columns as wide as their widest cell; nothing when there are no rows.
fn table(output: &mut Output, headings: &[&'static str], rows: &[Vec<String>]) {
    let widths = (0..headings.len()).map(|column| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([headings[column].len()]).max().unwrap_or_default()
    });
    let table = Table::new(headings.iter().zip(widths).map(|(&heading, width)| (heading, "", width)));
    let lines = [headings.iter().map(|&heading| heading.to_owned()).collect()].into_iter().chain(rows.iter().cloned());
    for cells in lines {
        output.line(format!("  {}", table.left_row(&cells)));
    }
}

pub(super) fn print(diagnosis: &Diagnosis, output: &mut Output) {
    plugin(diagnosis, output);
    interfaces(diagnosis, output);
    rdma(diagnosis, output);
    limits(diagnosis, output);
    nccl(diagnosis, output);
    settings(diagnosis, output);
    findings(diagnosis, output);
}

fn plugin(diagnosis: &Diagnosis, output: &mut Output) {
    let facts = &diagnosis.plugin;
    output.line(format!("Plugin (towline {})", diagnosis.version));
    output.line(format!("  {}", facts.file.display()));
    if let Some(error) = &facts.error {
        return output.line(format!("  {error}"));
    }
    output.line(format!("  {}, interface {}", facts.name, facts.versions.join(" ")));
    for (number, device) in facts.devices.iter().enumerate() {
        let pci = device.pci_path.as_ref().map_or(String::new(), |path| format!(", {path}"));
        output.line(format!("  device {number}: {} at {} Mbit/s{pci}", device.name, device.speed_mbps));
    }
}

/// Those in use as a table; the others, of which a host may have many, as one line of addresses.
fn interfaces(diagnosis: &Diagnosis, output: &mut Output) {
    output.line(format!("Interfaces (chosen: {})", diagnosis.interfaces.rule));
    let row = |interface: &super::interfaces::Interface| {
        vec![
            interface.name.clone(),
            interface.address.clone(),
            or_unknown(interface.speed_mbps),
            or_unknown(interface.mtu),
            or_unknown(interface.driver.as_ref()),
            or_unknown(interface.numa_node),
        ]
    };
    let (used, others): (Vec<_>, Vec<_>) = diagnosis.interfaces.list.iter().partition(|interface| interface.used);
    let rows: Vec<_> = used.into_iter().map(row).collect();
    if !rows.is_empty() {
        table(output, &["name", "address", "Mbit/s", "MTU (B)", "driver", "NUMA"], &rows);
    }
    let other = |interface: &&super::interfaces::Interface| {
        let down = if interface.running { "" } else { " (down)" };
        format!("{} {}{down}", interface.name, interface.address)
    };
    if !others.is_empty() {
        output.line(format!("  not used: {}", others.iter().map(other).collect::<Vec<_>>().join(", ")));
    }
}

fn rdma(diagnosis: &Diagnosis, output: &mut Output) {
    let facts = &diagnosis.rdma;
    let devices = if facts.ports.is_empty() { ", no devices" } else { "" };
    output.line(match &facts.library_error {
        None => format!("RDMA: libibverbs loads{devices}"),
        Some(error) => format!("RDMA: libibverbs does not load: {error}{devices}"),
    });
    if facts.ports.is_empty() {
        return;
    }
    let row = |port: &super::rdma::Port| {
        [&port.device, &port.port, &port.state, &port.link_layer, &port.rate].map(String::clone).to_vec()
    };
    let rows: Vec<_> = facts.ports.iter().map(row).collect();
    table(output, &["device", "port", "state", "link", "rate"], &rows);
    let gpu = facts.peer_memory.as_deref().unwrap_or("no");
    output.line(format!("  GPU memory by its address (peer memory): {gpu}"));
    if let Some(why) = facts.ruled_out {
        output.line(format!("  RDMA would not be used: {why}"));
    }
    let would = if facts.ruled_out.is_some() { "without that would use" } else { "would use" };
    for port in &facts.chosen {
        let dmabuf = if port.takes_dmabuf { "yes" } else { "no" };
        output.line(format!("  {would} {} at {} Mbit/s, DMA-BUF {dmabuf}, with", port.name, port.speed_mbps));
        output.line(format!("    GID {} ({}): {}", port.gid_index, port.gid, port.gid_why));
        for (index, gid, version) in &port.gids {
            output.line(format!("      {index:>3} {gid} {version}"));
        }
    }
    for port in &facts.others {
        output.line(format!("  would not use {}, which is down or left out by NCCL_IB_HCA; its GIDs:", port.name));
        for (index, gid, version) in &port.gids {
            output.line(format!("      {index:>3} {gid} {version}"));
        }
    }
}

fn limits(diagnosis: &Diagnosis, output: &mut Output) {
    let facts = &diagnosis.limits;
    let limit = |limit: Limit, unit: &str| {
        let text = |value: Option<u64>| value.map_or("unlimited".to_owned(), |value| format!("{value}{unit}"));
        format!("{} (at most {})", text(limit.soft), text(limit.hard))
    };
    let three = |buffer: Option<[u64; 3]>| {
        buffer.map_or("-".to_owned(), |[least, initial, most]| format!("{least} {initial} {most} B"))
    };
    let mut control = or_unknown(facts.congestion_control.as_ref());
    if !facts.congestion_controls.is_empty() {
        control = format!("{control} (of {})", facts.congestion_controls.join(", "));
    }
    let cores = match facts.own_cores {
        own if own < facts.cores => format!("{}, {own} for each process of the job", facts.cores),
        _ => facts.cores.to_string(),
    };
    output.line("Limits");
    let buffers = [three(facts.tcp_receive_buffer), three(facts.tcp_send_buffer)];
    for (name, value) in [
        ("open files", limit(facts.descriptors, "")),
        ("locked memory", limit(facts.locked_memory_bytes, " B")),
        ("TCP buffers", format!("tcp_rmem {}, tcp_wmem {}", buffers[0], buffers[1])),
        ("congestion control", control),
        ("cores", cores),
    ] {
        output.line(format!("  {name:<19} {value}"));
    }
}

fn nccl(diagnosis: &Diagnosis, output: &mut Output) {
    if diagnosis.nccl.is_empty() {
        return output.line("NCCL libraries: none on LD_LIBRARY_PATH, in the loader's cache, or where pip puts them");
    }
    output.line("NCCL libraries");
    for library in &diagnosis.nccl {
        // The newest that both sides have, as NCCL chooses.
        let ours = diagnosis.plugin.versions.iter().filter_map(|version| version.trim_start_matches('v').parse().ok());
        let chosen = library.net_api.and_then(|newest| ours.filter(|&version: &u32| version <= newest).max());
        let used = match (chosen, library.net_api) {
            (Some(version), _) => format!("would use the plugin's v{version}"),
            (None, Some(newest)) => format!("looks for v{newest} and older, which the plugin lacks"),
            (None, None) => "does not tell which interface it uses".to_owned(),
        };
        output.line(format!("  {}: {}, {used}", library.file.display(), or_unknown(library.release.as_ref())));
    }
}

fn settings(diagnosis: &Diagnosis, output: &mut Output) {
    let facts = &diagnosis.settings;
    if facts.files.is_empty() && facts.set.is_empty() && facts.others.is_empty() {
        return output.line("Settings: all defaults");
    }
    output.line("Settings");
    for file in &facts.files {
        output.line(format!("  read from {}", file.display()));
    }
    for setting in &facts.set {
        let note = if setting.is_valid { "" } else { "  (the value given is not valid: this is the default)" };
        output.line(format!("  {}={}{note}", setting.name, setting.value));
    }
    for other in &facts.others {
        output.line(format!("  {other}  (read by NCCL only)"));
    }
}

/// The findings, and at the end the verdict, right above the shell's next prompt.
fn findings(diagnosis: &Diagnosis, output: &mut Output) {
    output.line("");
    for finding in diagnosis.findings.iter().rev() {
        let kind = if finding.severity == Severity::Problem { "PROBLEM" } else { "Advice" };
        output.line(format!("{kind}: {}", finding.what));
        output.line(format!("    {}", finding.fix));
    }
    let problems = diagnosis.findings.iter().filter(|finding| finding.severity == Severity::Problem).count();
    let network = match diagnosis.plugin.devices.as_slice() {
        [] => "no device".to_owned(),
        devices => devices.iter().map(|device| device.name.as_str()).collect::<Vec<_>>().join(" "),
    };
    output.line(match problems {
        0 => format!("No problem found: {} would use {network}.", diagnosis.plugin.name),
        1 => "1 problem found; its cure stands below it.".to_owned(),
        many => format!("{many} problems found; the cure of each stands below it."),
    });
}
