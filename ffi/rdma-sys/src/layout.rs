//! What libibverbs and its callers agree on, checked whenever this crate is compiled: sizes, offsets and numbers of all
//! that Towline uses.
//!
//! The two lists below are also read by `tests/sources/bindings.rs`, which has a C compiler compare them with the
//! headers of rdma-core. A struct without a size is made by libibverbs only and may grow at its end, or ends in glibc's
//! mutexes, whose size depends on the processor.

use crate::*;
use std::mem::{offset_of, size_of};

macro_rules! layouts {
    ($($type:ident $(= $size:literal)? { $($($field:ident).+: $offset:literal,)* })*) => {
        $(const _: () = {
            $(assert!(size_of::<$type>() == $size);)?
            $(assert!(offset_of!($type, $($field).+) == $offset);)*
        };)*
    };
}

macro_rules! numbers {
    ($($module:ident::$name:ident $(.$inner:tt)? = $number:literal;)*) => {
        $(const _: () = assert!($module::$name $(.$inner)? == $number);)*
    };
}

layouts! {
    ibv_gid = 16 {
        raw: 0,
        global.subnet_prefix: 0,
        global.interface_id: 8,
    }
    ibv_context {
        device: 0,
        ops.poll_cq: 96,
        ops.req_notify_cq: 104,
        ops.post_send: 208,
        ops.post_recv: 216,
        cmd_fd: 264,
        async_fd: 268,
        num_comp_vectors: 272,
    }
    ibv_device_attr = 232 {
        sys_image_guid: 72,
        max_qp: 108,
        max_qp_wr: 112,
        max_cqe: 132,
        max_qp_rd_atom: 144,
        phys_port_cnt: 227,
    }
    ibv_port_attr {
        state: 0,
        max_mtu: 4,
        active_mtu: 8,
        gid_tbl_len: 12,
        port_cap_flags: 16,
        max_msg_sz: 20,
        lid: 34,
        link_layer: 46,
        flags: 47,
        active_width: 43,
        active_speed: 44,
    }
    ibv_pd = 16 {
        context: 0,
        handle: 8,
    }
    ibv_mr = 48 {
        context: 0,
        pd: 8,
        addr: 16,
        length: 24,
        handle: 32,
        lkey: 36,
        rkey: 40,
    }
    ibv_comp_channel = 16 {
        context: 0,
        fd: 8,
        refcnt: 12,
    }
    ibv_cq {
        context: 0,
        channel: 8,
        cq_context: 16,
        handle: 24,
        cqe: 28,
    }
    ibv_qp {
        context: 0,
        qp_context: 8,
        pd: 16,
        send_cq: 24,
        recv_cq: 32,
        srq: 40,
        handle: 48,
        qp_num: 52,
        state: 56,
        qp_type: 60,
    }
    ibv_qp_cap = 20 {
        max_send_wr: 0,
        max_recv_wr: 4,
        max_send_sge: 8,
        max_recv_sge: 12,
        max_inline_data: 16,
    }
    ibv_qp_init_attr = 64 {
        qp_context: 0,
        send_cq: 8,
        recv_cq: 16,
        srq: 24,
        cap: 32,
        qp_type: 52,
        sq_sig_all: 56,
    }
    ibv_global_route = 24 {
        dgid: 0,
        flow_label: 16,
        sgid_index: 20,
        hop_limit: 21,
        traffic_class: 22,
    }
    ibv_ah_attr = 32 {
        grh: 0,
        dlid: 24,
        sl: 26,
        src_path_bits: 27,
        static_rate: 28,
        is_global: 29,
        port_num: 30,
    }
    ibv_qp_attr = 144 {
        qp_state: 0,
        cur_qp_state: 4,
        path_mtu: 8,
        path_mig_state: 12,
        qkey: 16,
        rq_psn: 20,
        sq_psn: 24,
        dest_qp_num: 28,
        qp_access_flags: 32,
        cap: 36,
        ah_attr: 56,
        alt_ah_attr: 88,
        pkey_index: 120,
        alt_pkey_index: 122,
        en_sqd_async_notify: 124,
        sq_draining: 125,
        max_rd_atomic: 126,
        max_dest_rd_atomic: 127,
        min_rnr_timer: 128,
        port_num: 129,
        timeout: 130,
        retry_cnt: 131,
        rnr_retry: 132,
        alt_port_num: 133,
        alt_timeout: 134,
        rate_limit: 136,
    }
    ibv_sge = 16 {
        addr: 0,
        length: 8,
        lkey: 12,
    }
    ibv_recv_wr = 32 {
        wr_id: 0,
        next: 8,
        sg_list: 16,
        num_sge: 24,
    }
    ibv_send_wr = 128 {
        wr_id: 0,
        next: 8,
        sg_list: 16,
        num_sge: 24,
        opcode: 28,
        send_flags: 32,
        imm_data_invalidated_rkey_union: 36,
        wr.rdma.remote_addr: 40,
        wr.rdma.rkey: 48,
        qp_type.xrc.remote_srqn: 72,
        bind_mw_tso_union.tso.hdr: 80,
        bind_mw_tso_union.tso.hdr_sz: 88,
        bind_mw_tso_union.tso.mss: 90,
    }
    ibv_wc = 48 {
        wr_id: 0,
        status: 8,
        opcode: 12,
        vendor_err: 16,
        byte_len: 20,
        imm_data_invalidated_rkey_union: 24,
        qp_num: 28,
        src_qp: 32,
        wc_flags: 36,
        pkey_index: 40,
        slid: 42,
        sl: 44,
        dlid_path_bits: 45,
    }
    ibv_async_event = 16 {
        element: 0,
        event_type: 8,
    }
    ibv_ece = 12 {
        vendor_id: 0,
        options: 4,
        comp_mask: 8,
    }
}

numbers! {
    ibv_wr_opcode::IBV_WR_RDMA_WRITE = 0;
    ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM = 1;
    ibv_wr_opcode::IBV_WR_RDMA_READ = 4;
    ibv_wc_opcode::IBV_WC_SEND = 0;
    ibv_wc_opcode::IBV_WC_RDMA_WRITE = 1;
    ibv_wc_opcode::IBV_WC_RDMA_READ = 2;
    ibv_wc_opcode::IBV_WC_RECV = 128;
    ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM = 129;
    ibv_wc_status::IBV_WC_SUCCESS = 0;
    ibv_wc_status::IBV_WC_LOC_LEN_ERR = 1;
    ibv_wc_status::IBV_WC_LOC_QP_OP_ERR = 2;
    ibv_wc_status::IBV_WC_LOC_PROT_ERR = 4;
    ibv_wc_status::IBV_WC_WR_FLUSH_ERR = 5;
    ibv_wc_status::IBV_WC_LOC_ACCESS_ERR = 8;
    ibv_wc_status::IBV_WC_REM_INV_REQ_ERR = 9;
    ibv_wc_status::IBV_WC_REM_ACCESS_ERR = 10;
    ibv_wc_status::IBV_WC_REM_OP_ERR = 11;
    ibv_wc_status::IBV_WC_RETRY_EXC_ERR = 12;
    ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR = 13;
    ibv_wc_status::IBV_WC_FATAL_ERR = 19;
    ibv_qp_type::IBV_QPT_RC = 2;
    ibv_qp_state::IBV_QPS_RESET = 0;
    ibv_qp_state::IBV_QPS_INIT = 1;
    ibv_qp_state::IBV_QPS_RTR = 2;
    ibv_qp_state::IBV_QPS_RTS = 3;
    ibv_qp_state::IBV_QPS_ERR = 6;
    ibv_port_state::IBV_PORT_ACTIVE = 4;
    ibv_send_flags::IBV_SEND_SIGNALED.0 = 2;
    ibv_send_flags::IBV_SEND_INLINE.0 = 8;
    ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0 = 1;
    ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0 = 2;
    ibv_access_flags::IBV_ACCESS_REMOTE_READ.0 = 4;
    ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING.0 = 1048576;
    ibv_qp_attr_mask::IBV_QP_STATE.0 = 1;
    ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS.0 = 8;
    ibv_qp_attr_mask::IBV_QP_PKEY_INDEX.0 = 16;
    ibv_qp_attr_mask::IBV_QP_PORT.0 = 32;
    ibv_qp_attr_mask::IBV_QP_AV.0 = 128;
    ibv_qp_attr_mask::IBV_QP_PATH_MTU.0 = 256;
    ibv_qp_attr_mask::IBV_QP_TIMEOUT.0 = 512;
    ibv_qp_attr_mask::IBV_QP_RETRY_CNT.0 = 1024;
    ibv_qp_attr_mask::IBV_QP_RNR_RETRY.0 = 2048;
    ibv_qp_attr_mask::IBV_QP_RQ_PSN.0 = 4096;
    ibv_qp_attr_mask::IBV_QP_MAX_QP_RD_ATOMIC.0 = 8192;
    ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER.0 = 32768;
    ibv_qp_attr_mask::IBV_QP_SQ_PSN.0 = 65536;
    ibv_qp_attr_mask::IBV_QP_MAX_DEST_RD_ATOMIC.0 = 131072;
    ibv_qp_attr_mask::IBV_QP_DEST_QPN.0 = 1048576;
}
