//! Every struct of NCCL's plugin interface that we declare has NCCL's size, alignment and offsets.
//!
//! `layouts.json` holds what a C compiler said about NCCL's own headers. A struct or a field that is in there and not
//! in the list below fails the test, and so does the reverse.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::{align_of, offset_of, size_of};

use serde::Deserialize;
use towline::nccl::ffi::*;

/// What a compiler says about one struct.
#[derive(Debug, Deserialize, PartialEq, Eq)]
struct Layout {
    size: usize,
    align: usize,
    /// Offsets by path: "vProps" and "vProps.ndevs".
    offsets: BTreeMap<String, usize>,
}

type Layouts = BTreeMap<String, Layout>;

/// Measures structs: `measure!(into; [types] { fields })`, where a field may list its own in brackets, and where
/// fields after `; u:` are those of the descriptor's union (nameless in NCCL, called `u` in ours).
macro_rules! measure {
    ($into:ident; $([$($type:ident)+] $fields:tt)+) => { $( $( measure!(@one $into $type $fields); )+ )+ };
    (@one $into:ident $type:ident {
        $($field:ident $([$($part:ident)+])?)*
        $(; u: $($member:ident [$($inner:ident)+])+)?
    }) => {
        let mut offsets = BTreeMap::new();
        $(
            offsets.insert(path(&[stringify!($field)]), offset_of!($type, $field));
            $($(
                offsets.insert(path(&[stringify!($field), stringify!($part)]), offset_of!($type, $field.$part));
            )+)?
        )*
        $($(
            offsets.insert(path(&[stringify!($member)]), offset_of!($type, u.$member));
            $(
                offsets.insert(path(&[stringify!($member), stringify!($inner)]), offset_of!($type, u.$member.$inner));
            )+
        )+)?
        let layout = Layout { size: size_of::<$type>(), align: align_of::<$type>(), offsets };
        assert!($into.insert(stringify!($type).to_owned(), layout).is_none(), "listed twice");
    };
}

/// A path as `layouts.json` writes it; `type` is a word of Rust's, so bindgen calls that field `type_`.
fn path(names: &[&str]) -> String {
    names.iter().map(|name| name.trim_end_matches('_')).collect::<Vec<_>>().join(".")
}

/// The net interface.
fn net() -> Layouts {
    let mut all = Layouts::new();
    measure! { all;
        [ncclNet_v4_t ncclNet_v5_t] {
            name init devices getProperties listen connect accept regMr deregMr isend irecv iflush test closeSend
            closeRecv closeListen
        }
        [ncclNetProperties_v4_t] {
            name pciPath guid ptrSupport speed port maxComms
        }
        [ncclNet_v6_t] {
            name init devices getProperties listen connect accept regMr regMrDmaBuf deregMr isend irecv iflush test
            closeSend closeRecv closeListen
        }
        [ncclNetProperties_v6_t] {
            name pciPath guid ptrSupport speed port latency maxComms maxRecvs
        }
        [ncclNet_v7_t ncclNet_v8_t] {
            name init devices getProperties listen connect accept regMr regMrDmaBuf deregMr isend irecv iflush test
            closeSend closeRecv closeListen getDeviceMr irecvConsumed
        }
        [ncclNetProperties_v7_t] {
            name pciPath guid ptrSupport speed port latency maxComms maxRecvs netDeviceType netDeviceVersion
        }
        [ncclNetProperties_v8_t] {
            name pciPath guid ptrSupport regIsGlobal speed port latency maxComms maxRecvs netDeviceType
            netDeviceVersion
        }
        [ncclNet_v9_t ncclNet_v10_t] {
            name init devices getProperties listen connect accept regMr regMrDmaBuf deregMr isend irecv iflush test
            closeSend closeRecv closeListen getDeviceMr irecvConsumed makeVDevice
        }
        [ncclNetVDeviceProps_v9_t ncclNetVDeviceProps_v10_t ncclNetVDeviceProps_v11_t ncclNetVDeviceProps_v12_t] {
            ndevs devs
        }
        [ncclNetProperties_v9_t ncclNetProperties_v10_t] {
            name pciPath guid ptrSupport regIsGlobal forceFlush speed port latency maxComms maxRecvs netDeviceType
            netDeviceVersion vProps [ndevs devs] maxP2pBytes maxCollBytes
        }
        [ncclNetCommConfig_v10_t ncclNetCommConfig_v12_t] {
            trafficClass
        }
        [ncclNet_v11_t ncclNet_v12_t] {
            name init devices getProperties listen connect accept regMr regMrDmaBuf deregMr isend irecv iflush test
            closeSend closeRecv closeListen getDeviceMr irecvConsumed makeVDevice finalize setNetAttr
        }
        [ncclNetProperties_v11_t] {
            name pciPath guid ptrSupport regIsGlobal forceFlush speed port latency maxComms maxRecvs netDeviceType
            netDeviceVersion vProps [ndevs devs] maxP2pBytes maxCollBytes maxMultiRequestSize
        }
        [ncclNetCommAttr_v11_t ncclNetCommAttr_v12_t] {
            maxConcurrentPeers minConcurrentPeers maxFlowsPerPeer minFlowsPerPeer
        }
        [ncclNetAttr_v11_t ncclNetAttr_v12_t] {
            sendCommAttr [maxConcurrentPeers minConcurrentPeers maxFlowsPerPeer minFlowsPerPeer] recvCommAttr
            [maxConcurrentPeers minConcurrentPeers maxFlowsPerPeer minFlowsPerPeer] op algo proto
        }
        [ncclNetProperties_v12_t] {
            name pciPath guid ptrSupport regIsGlobal forceFlush speed port latency maxComms maxRecvs netDeviceType
            netDeviceVersion vProps [ndevs devs] maxP2pBytes maxCollBytes maxMultiRequestSize railId planeId
        }
        [ncclNetDeviceHandle_v7_t] {
            netDeviceType netDeviceVersion handle size needsProxyProgress
        }
    }
    all
}

/// The profiler interface.
fn profiler() -> Layouts {
    let mut all = Layouts::new();
    measure! { all;
        [ncclProfiler_v1_t ncclProfiler_v2_t ncclProfiler_v3_t ncclProfiler_v4_t ncclProfiler_v5_t ncclProfiler_v6_t
            ncclProfiler_v7_t] {
            name init startEvent stopEvent recordEventState finalize
        }
        [ncclProfilerEventDescr_v1_t] {
            type_ parentObj rank
            ; u:
            coll [name commHash seqNumber func sendBuff recvBuff count root datatype op trafficBytes nMaxChannels
                nWarps algo proto isCollnet isNvls]
            p2p [name commHash func buff datatype count peer]
            proxyOp [pid channelId peer nSteps chunkSize isSend]
            proxyStep [step]
        }
        [ncclProfilerEventDescr_v2_t] {
            type_ parentObj rank
            ; u:
            coll [name commHash seqNumber func sendBuff recvBuff count root datatype trafficBytes nMaxChannels nWarps
                algo proto]
            p2p [name commHash func buff datatype count peer]
            proxyOp [pid channelId peer nSteps chunkSize isSend]
            proxyStep [step]
        }
        [ncclProfilerEventDescr_v3_t] {
            type_ parentObj rank
            ; u:
            coll [name commHash seqNumber func sendBuff recvBuff count root datatype nMaxChannels nWarps algo proto]
            p2p [name commHash func buff datatype count peer]
            proxyOp [pid channelId peer nSteps chunkSize isSend]
            proxyStep [step]
            kernelCh [channelId]
            netPlugin [id data]
        }
        [ncclProfilerEventDescr_v4_t] {
            type_ parentObj rank
            ; u:
            coll [seqNumber func sendBuff recvBuff count root datatype nChannels nWarps algo proto]
            p2p [func buff datatype count peer nChannels]
            proxyOp [pid channelId peer nSteps chunkSize isSend]
            proxyStep [step]
            kernelCh [channelId pTimer]
            netPlugin [id data]
        }
        [ncclProfilerEventDescr_v5_t] {
            type_ parentObj rank
            ; u:
            groupApi [graphCaptured groupDepth]
            collApi [func count datatype root stream graphCaptured]
            p2pApi [func count datatype stream graphCaptured]
            kernelLaunch [stream]
            coll [seqNumber func sendBuff recvBuff count root datatype nChannels nWarps algo proto parentGroup]
            p2p [func buff datatype count peer nChannels parentGroup]
            proxyOp [pid channelId peer nSteps chunkSize isSend]
            proxyStep [step]
            kernelCh [channelId pTimer]
            netPlugin [id data]
        }
        [ncclProfilerEventDescr_v6_t] {
            type_ parentObj rank
            ; u:
            groupApi [graphCaptured groupDepth]
            collApi [func count datatype root stream graphCaptured]
            p2pApi [func count datatype stream graphCaptured]
            kernelLaunch [stream]
            coll [seqNumber func sendBuff recvBuff count root datatype nChannels nWarps algo proto parentGroup]
            p2p [func buff datatype count peer nChannels parentGroup]
            proxyOp [pid channelId peer nSteps chunkSize isSend]
            proxyStep [step]
            kernelCh [channelId pTimer]
            netPlugin [id data]
            ceColl [seqNumber func sendBuff recvBuff count root datatype syncStrategy intraBatchSync batchSize
                numBatches ceSeqNum stream]
            ceCollSync [isComplete nRanks]
            ceCollBatch [numOps totalBytes useIntraSync]
        }
        [ncclProfilerEventDescr_v7_t] {
            type_ parentObj rank
            ; u:
            groupApi [graphCaptured groupDepth]
            collApi [func count datatype root stream graphCaptured userTag]
            p2pApi [func count datatype stream graphCaptured userTag]
            kernelLaunch [stream]
            coll [seqNumber func sendBuff recvBuff count root datatype nChannels nWarps algo proto parentGroup
                kernelVariant isSymColl userTag]
            p2p [func buff datatype count peer nChannels parentGroup userTag]
            proxyOp [pid channelId peer nSteps chunkSize isSend]
            proxyStep [step]
            kernelCh [channelId pTimer]
            netPlugin [id data]
            ceColl [seqNumber func sendBuff recvBuff count root datatype syncStrategy intraBatchSync batchSize
                numBatches ceSeqNum stream userTag]
            ceCollSync [isComplete nRanks]
            ceCollBatch [numOps totalBytes useIntraSync]
            kernelPhase [channelId phaseId phaseName pTimer]
        }
        [ncclProfilerEventStateArgs_v1_t ncclProfilerEventStateArgs_v2_t ncclProfilerEventStateArgs_v3_t] {
            proxyOp [transSize steps] proxyCtrl [appendedProxyOps]
        }
        [ncclProfilerEventStateArgs_v4_t ncclProfilerEventStateArgs_v5_t] {
            proxyStep [transSize] proxyCtrl [appendedProxyOps] netPlugin [data] kernelCh [pTimer]
        }
        [ncclProfilerNetIbDescr_v1_t] {
            type_ qp [device wr_id opcode qpNum length]
        }
        [ncclProfilerNetSockDescr_v1_t] {
            type_ sock [fd op length]
        }
    }
    all
}

/// The one-sided interface.
fn one_sided() -> Layouts {
    let mut all = Layouts::new();
    measure! { all;
        [ncclRma_v14_t ncclRma_v15_t] {
            name init devices getProperties listen connect createContext regMrSym regMrSymDmaBuf deregMrSym
            destroyContext closeColl closeListen iput iputSignal iget iflush test rmaProgress queryLastError finalize
        }
        [ncclRmaConfig_v14_t] {
            nContexts trafficClass rankStride
        }
    }
    all
}

fn expected() -> Layouts {
    serde_json::from_str(include_str!("layouts.json")).expect("layouts.json is well-formed")
}

fn ours() -> Layouts {
    let mut all = net();
    all.extend(profiler());
    all.extend(one_sided());
    all
}

#[test]
fn every_struct_is_measured() {
    let (ours, expected) = (ours(), expected());
    assert_eq!(ours.keys().collect::<BTreeSet<_>>(), expected.keys().collect::<BTreeSet<_>>());
}

#[test]
fn every_size_alignment_and_offset_is_nccl_s() {
    let expected = expected();
    for (name, layout) in ours() {
        assert_eq!(Some(&layout), expected.get(&name), "{name}");
    }
}

#[test]
fn versions_that_share_a_struct_in_nccl_share_it_here() {
    fn same<T>(_: Option<T>, _: Option<T>) {}
    same(None::<ncclNetProperties_v5_t>, None::<ncclNetProperties_v6_t>);
    same(None::<ncclNetCommConfig_v11_t>, None::<ncclNetCommConfig_v10_t>);
    same(None::<ncclProfilerEventStateArgs_v6_t>, None::<ncclProfilerEventStateArgs_v5_t>);
    same(None::<ncclProfilerEventStateArgs_v7_t>, None::<ncclProfilerEventStateArgs_v5_t>);
}
