//! A [`Body`] as named values: Perfetto shows them for a selected event, and the report reads them back.
//!
//! [`fields`] and [`body`] are each other's inverse, so that a trace file holds all that a summary is made from.

use super::super::event::{Body, Carrier, CeColl, Coll, CollApi, Kind, NetPart, P2p, ProxyOp};
use super::super::names::Name;
use std::net::Ipv6Addr;

/// A named value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value {
    /// A number without a sign.
    Uint(u64),
    /// A number with one.
    Int(i64),
    /// Yes or no.
    Bool(bool),
    /// An address, shown in hexadecimal.
    Pointer(u64),
    /// A string.
    Text(Name),
    /// A network address; IPv4 is mapped.
    Address(Ipv6Addr),
}

use Value::{Address, Bool, Int, Pointer, Text, Uint};

/// Where a NetPlugin event's descriptor came from.
const SOURCE: &str = "source";

/// How long a part is. Not "length": Perfetto's own page treats a set of values with that name among them as a list. It
/// then shows an error in place of the slice (seen with its version 20).
const LENGTH: &str = "bytes";

/// Puts out the fields of a start, in the order to be shown.
pub(crate) fn fields(start: &Body, put: &mut dyn FnMut(&'static str, Value)) {
    match *start {
        Body::Group | Body::ProxyCtrl | Body::NetSum(_) | Body::State { .. } | Body::NetTimes(_) | Body::Stop => {}
        Body::GroupApi { depth, graph } => {
            put("depth", Int(depth.into()));
            put("graph", Bool(graph));
        }
        Body::CollApi(call) | Body::P2pApi(call) => {
            put("func", Text(call.func));
            put("count", Uint(call.count));
            put("datatype", Text(call.datatype));
            put("root", Int(call.root.into()));
            put("stream", Pointer(call.stream));
            put("graph", Bool(call.graph));
            put_tag(call.tag, put);
        }
        Body::KernelLaunch { stream } => put("stream", Pointer(stream)),
        Body::Coll(coll) => {
            put("func", Text(coll.func));
            put("seq", Uint(coll.seq));
            put("count", Uint(coll.count));
            put("datatype", Text(coll.datatype));
            put("algorithm", Text(coll.algorithm));
            put("protocol", Text(coll.protocol));
            put("channels", Uint(coll.channels.into()));
            put("warps", Uint(coll.warps.into()));
            put("root", Int(coll.root.into()));
            put("send buffer", Pointer(coll.send_buffer));
            put("recv buffer", Pointer(coll.recv_buffer));
            if coll.variant.is_some() {
                put("kernel", Text(coll.variant));
                put("symmetric", Bool(coll.symmetric));
            }
        }
        Body::P2p(p2p) => {
            put("func", Text(p2p.func));
            put("peer", Int(p2p.peer.into()));
            put("count", Uint(p2p.count));
            put("datatype", Text(p2p.datatype));
            put("channels", Uint(p2p.channels.into()));
            put("buffer", Pointer(p2p.buffer));
            put_tag(p2p.tag, put);
        }
        Body::ProxyOp(op) => {
            put("send", Bool(op.send));
            put("peer", Int(op.peer.into()));
            put("channel", Uint(op.channel.into()));
            put("steps", Int(op.steps.into()));
            put("chunk", Int(op.chunk.into()));
            put("pid", Int(op.pid.into()));
        }
        Body::ProxyStep { step } => put("step", Int(step.into())),
        Body::KernelCh { channel, timer } => {
            put("channel", Uint(channel.into()));
            put("gpu start", Uint(timer));
        }
        Body::KernelPhase { channel, number, name, timer } => {
            put("channel", Uint(channel.into()));
            put("number", Uint(number.into()));
            put("phase", Text(name));
            put("gpu start", Uint(timer));
        }
        Body::NetSocket { fd, op, length } => {
            put(SOURCE, Text("socket".into()));
            put(LENGTH, Uint(length));
            put("fd", Int(fd.into()));
            put("op", Int(op.into()));
        }
        Body::NetIb { device, opcode, qp, wr_id, length } => {
            put(SOURCE, Text("ib".into()));
            put(LENGTH, Uint(length));
            put("device", Int(device.into()));
            put("opcode", Int(opcode.into()));
            put("qp", Int(qp.into()));
            put("wr_id", Uint(wr_id));
        }
        Body::NetTowline(part) => net_fields(&part, put),
        Body::NetOther { plugin } => {
            put(SOURCE, Text("other".into()));
            put("plugin", Int(plugin));
        }
        Body::CeColl(coll) => {
            put("func", Text(coll.func));
            put("seq", Uint(coll.seq));
            put("count", Uint(coll.count));
            put("datatype", Text(coll.datatype));
            put("root", Int(coll.root.into()));
            put("strategy", Text(coll.strategy));
            put("intra sync", Bool(coll.intra_sync));
            put("batch size", Uint(coll.batch_size.into()));
            put("batches", Uint(coll.batches.into()));
            put("ce seq", Uint(coll.ce_seq.into()));
            put("stream", Pointer(coll.stream));
            put("send buffer", Pointer(coll.send_buffer));
            put("recv buffer", Pointer(coll.recv_buffer));
            put_tag(coll.tag, put);
        }
        Body::CeSync { complete, ranks } => {
            put("complete", Bool(complete));
            put("ranks", Int(ranks.into()));
        }
        Body::CeBatch { ops, bytes, intra_sync } => {
            put("ops", Int(ops.into()));
            put("bytes", Uint(bytes));
            put("intra sync", Bool(intra_sync));
        }
    }
}

fn net_fields(part: &NetPart, put: &mut dyn FnMut(&'static str, Value)) {
    put(SOURCE, Text("towline".into()));
    put("send", Bool(part.send));
    put("message", Uint(part.message));
    put("offset", Uint(part.offset));
    put(LENGTH, Uint(part.length));
    put("rail", Uint(part.rail.into()));
    put("stream", Uint(part.stream.into()));
    if part.resend {
        put("resend", Bool(true));
    }
    let ip = Ipv6Addr::from(part.peer);
    if !ip.is_unspecified() {
        put("peer address", Address(ip));
        put("peer port", Uint(part.peer_port.into()));
    }
    put("link", Uint(part.link));
    match part.carrier {
        Carrier::Unknown => {}
        Carrier::Socket { fd } => put("fd", Int(fd.into())),
        Carrier::QueuePair { device, opcode, number, wr_id } => {
            put("device", Uint(device.into()));
            put("opcode", Uint(opcode.into()));
            put("qp", Int(number.into()));
            put("wr_id", Uint(wr_id));
        }
    }
}

/// Fields as they were read.
#[derive(Debug, Default)]
pub(crate) struct Fields(pub Vec<(Name, Value)>);

impl Fields {
    fn get(&self, name: &str) -> Option<Value> {
        self.0.iter().find(|(key, _)| key.text() == name).map(|(_, value)| *value)
    }

    /// The number of that name, 0 when there is none.
    pub(crate) fn uint(&self, name: &str) -> u64 {
        match self.get(name) {
            Some(Uint(number) | Pointer(number)) => number,
            Some(Int(number)) => number as u64,
            _ => 0,
        }
    }

    /// Whether there is a value of that name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// The number of that name, 0 when there is none.
    pub(crate) fn int(&self, name: &str) -> i32 {
        self.uint(name) as i32
    }

    /// The truth of that name.
    pub(crate) fn bool(&self, name: &str) -> bool {
        self.get(name) == Some(Bool(true))
    }

    /// The string of that name.
    pub(crate) fn text(&self, name: &str) -> Name {
        match self.get(name) {
            Some(Text(name)) => name,
            _ => Name::NONE,
        }
    }
}

fn put_tag(tag: u64, put: &mut dyn FnMut(&'static str, Value)) {
    if tag != 0 {
        put("tag", Uint(tag));
    }
}

/// The start that these fields describe.
pub(crate) fn body(kind: Kind, f: &Fields) -> Body {
    match kind {
        Kind::Group => Body::Group,
        Kind::ProxyCtrl => Body::ProxyCtrl,
        Kind::GroupApi => Body::GroupApi { depth: f.int("depth"), graph: f.bool("graph") },
        Kind::CollApi => Body::CollApi(call(f)),
        Kind::P2pApi => Body::P2pApi(call(f)),
        Kind::KernelLaunch => Body::KernelLaunch { stream: f.uint("stream") },
        Kind::Coll => Body::Coll(Coll {
            seq: f.uint("seq"),
            count: f.uint("count"),
            send_buffer: f.uint("send buffer"),
            recv_buffer: f.uint("recv buffer"),
            root: f.int("root"),
            func: f.text("func"),
            datatype: f.text("datatype"),
            algorithm: f.text("algorithm"),
            protocol: f.text("protocol"),
            channels: f.uint("channels") as u8,
            warps: f.uint("warps") as u8,
            variant: f.text("kernel"),
            symmetric: f.bool("symmetric"),
            ..Coll::default()
        }),
        Kind::P2p => Body::P2p(P2p {
            count: f.uint("count"),
            buffer: f.uint("buffer"),
            tag: f.uint("tag"),
            peer: f.int("peer"),
            func: f.text("func"),
            datatype: f.text("datatype"),
            channels: f.uint("channels") as u8,
            ..P2p::default()
        }),
        Kind::ProxyOp => Body::ProxyOp(ProxyOp {
            pid: f.int("pid"),
            peer: f.int("peer"),
            steps: f.int("steps"),
            chunk: f.int("chunk"),
            channel: f.uint("channel") as u8,
            send: f.bool("send"),
        }),
        Kind::ProxyStep => Body::ProxyStep { step: f.int("step") },
        Kind::KernelCh => Body::KernelCh { channel: f.uint("channel") as u8, timer: f.uint("gpu start") },
        Kind::KernelPhase => Body::KernelPhase {
            channel: f.uint("channel") as u8,
            number: f.uint("number") as u8,
            name: f.text("phase"),
            timer: f.uint("gpu start"),
        },
        Kind::NetPlugin => net(f),
        Kind::CeColl => Body::CeColl(CeColl {
            seq: f.uint("seq"),
            count: f.uint("count"),
            send_buffer: f.uint("send buffer"),
            recv_buffer: f.uint("recv buffer"),
            stream: f.uint("stream"),
            root: f.int("root"),
            batch_size: f.uint("batch size") as u32,
            batches: f.uint("batches") as u32,
            ce_seq: f.uint("ce seq") as u32,
            func: f.text("func"),
            datatype: f.text("datatype"),
            strategy: f.text("strategy"),
            intra_sync: f.bool("intra sync"),
            tag: f.uint("tag"),
        }),
        Kind::CeSync => Body::CeSync { complete: f.bool("complete"), ranks: f.int("ranks") },
        Kind::CeBatch => Body::CeBatch { ops: f.int("ops"), bytes: f.uint("bytes"), intra_sync: f.bool("intra sync") },
    }
}

fn call(f: &Fields) -> CollApi {
    CollApi {
        func: f.text("func"),
        datatype: f.text("datatype"),
        root: f.int("root"),
        count: f.uint("count"),
        stream: f.uint("stream"),
        graph: f.bool("graph"),
        tag: f.uint("tag"),
    }
}

fn net(f: &Fields) -> Body {
    match f.text(SOURCE).text() {
        "socket" => Body::NetSocket { fd: f.int("fd"), op: f.int("op"), length: f.uint(LENGTH) },
        "ib" => Body::NetIb {
            device: f.int("device"),
            opcode: f.int("opcode"),
            qp: f.int("qp"),
            wr_id: f.uint("wr_id"),
            length: f.uint(LENGTH),
        },
        "towline" => Body::NetTowline(NetPart {
            link: f.uint("link"),
            message: f.uint("message"),
            offset: f.uint("offset"),
            length: f.uint(LENGTH),
            peer: match f.get("peer address") {
                Some(Address(ip)) => ip.octets(),
                _ => [0; 16],
            },
            peer_port: f.uint("peer port") as u16,
            rail: f.uint("rail") as u16,
            stream: f.uint("stream") as u16,
            send: f.bool("send"),
            resend: f.bool("resend"),
            // The slice's own time is that of the event.
            ago_ns: 0,
            over: 0,
            carrier: if f.get("qp").is_some() {
                let (device, opcode) = (f.uint("device") as u16, f.uint("opcode") as u8);
                Carrier::QueuePair { device, opcode, number: f.int("qp"), wr_id: f.uint("wr_id") }
            } else if f.get("fd").is_some() {
                Carrier::Socket { fd: f.int("fd") }
            } else {
                Carrier::Unknown
            },
        }),
        _ => Body::NetOther { plugin: f.uint("plugin") as i64 },
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// One body of every kind with no field at its default.
    pub(crate) fn samples() -> Vec<Body> {
        let call = CollApi {
            func: "AllReduce".into(),
            datatype: "ncclFloat32".into(),
            root: 3,
            count: 1 << 40,
            stream: 0x7fff_0000,
            graph: true,
            tag: 7,
        };
        let peer = "10.0.0.9".parse::<std::net::Ipv4Addr>().unwrap().to_ipv6_mapped().octets();
        vec![
            Body::Group,
            Body::ProxyCtrl,
            Body::GroupApi { depth: 2, graph: true },
            Body::CollApi(call),
            Body::P2pApi(call),
            Body::KernelLaunch { stream: 5 },
            Body::Coll(Coll {
                seq: 9,
                count: 10,
                send_buffer: 11,
                recv_buffer: 12,
                root: -1,
                func: "Broadcast".into(),
                datatype: "ncclInt8".into(),
                algorithm: "RING".into(),
                protocol: "LL128".into(),
                channels: 4,
                warps: 8,
                variant: "AllReduce_RING_LL".into(),
                symmetric: true,
                ..Coll::default()
            }),
            Body::P2p(P2p {
                count: 10,
                buffer: 3,
                peer: 6,
                func: "Send".into(),
                datatype: "ncclInt8".into(),
                channels: 2,
                tag: 8,
                ..P2p::default()
            }),
            Body::ProxyOp(ProxyOp { pid: 77, peer: 1, steps: 8, chunk: 4096, channel: 3, send: true }),
            Body::ProxyStep { step: 7 },
            Body::KernelCh { channel: 1, timer: 1 << 60 },
            Body::KernelPhase { channel: 1, number: 2, name: "final_sync".into(), timer: 1 << 60 },
            Body::NetSocket { fd: 5, op: 1, length: 99 },
            Body::NetIb { device: 1, opcode: 2, qp: 3, wr_id: 4, length: 5 },
            Body::NetTowline(NetPart {
                link: u64::MAX,
                message: 1,
                offset: 128,
                length: 256,
                peer,
                peer_port: 4711,
                rail: 1,
                stream: 2,
                send: true,
                resend: true,
                ago_ns: 0,
                over: 0,
                carrier: Carrier::QueuePair { device: 2, opcode: 3, number: 77, wr_id: u64::MAX },
            }),
            Body::NetTowline(NetPart { carrier: Carrier::Socket { fd: 12 }, ..NetPart::default() }),
            Body::NetOther { plugin: -3 },
            Body::CeColl(CeColl {
                seq: 1,
                count: 2,
                send_buffer: 3,
                recv_buffer: 4,
                stream: 5,
                root: 6,
                batch_size: 7,
                batches: 8,
                ce_seq: 9,
                func: "AllGather".into(),
                datatype: "ncclInt8".into(),
                strategy: "MC".into(),
                intra_sync: true,
                tag: 9,
            }),
            Body::CeSync { complete: true, ranks: 8 },
            Body::CeBatch { ops: 3, bytes: 4, intra_sync: true },
        ]
    }

    #[test]
    fn what_is_shown_of_a_start_is_enough_to_rebuild_it() {
        for start in samples() {
            let mut read = Fields::default();
            fields(&start, &mut |name, value| read.0.push((name.into(), value)));
            assert_eq!(body(start.kind().unwrap(), &read), start);
        }
    }
}
