/*
 * The profiler half of NCCL's plugin interface, stated in our own words.
 *
 * A descriptor is a type bit plus a union; the members of the union are types of their own, named after the first
 * interface version that has them. The union itself is called `u` here (it has no name in NCCL). Sizes and offsets
 * are checked against NCCL's by tests/abi/layout.rs.
 *
 *   NCCL 2.23 loads v1, 2.24-2.25 v2, 2.26 v3, 2.27 v4, 2.28 v5, 2.29 and later v6.
 */
#ifndef TOWLINE_NCCL_PROFILER_H
#define TOWLINE_NCCL_PROFILER_H

#include <stdbool.h>

#include "nccl_net.h"

typedef int ncclPid_t; // pid_t, on Linux

/* ---- event types: a descriptor's `type`, and the bits of the activation mask ------------------------------ */

enum {
  ncclProfileGroup = 1 << 0,
  ncclProfileColl = 1 << 1,
  ncclProfileP2p = 1 << 2,
  ncclProfileProxyOp = 1 << 3,
  ncclProfileProxyStep = 1 << 4,
  ncclProfileProxyCtrl = 1 << 5,
  ncclProfileKernelCh = 1 << 6,     /* from v3 */
  ncclProfileNetPlugin = 1 << 7,    /* from v3 */
  ncclProfileGroupApi = 1 << 8,     /* from v5, as the next three */
  ncclProfileCollApi = 1 << 9,
  ncclProfileP2pApi = 1 << 10,
  ncclProfileKernelLaunch = 1 << 11,
  ncclProfileCeColl = 1 << 12,      /* copy engine: from v6, as the next two */
  ncclProfileCeSync = 1 << 13,
  ncclProfileCeBatch = 1 << 14,
  ncclProfileKernelPhase = 1 << 15  /* from v7 */
};

/* ---- event states ----------------------------------------------------------------------------------------- */

typedef enum {
  ncclProfilerProxyOpSendPosted = 0, /* 0 to 7 are sent by v1 to v3 only */
  ncclProfilerProxyOpSendRemFifoWait = 1,
  ncclProfilerProxyOpSendTransmitted = 2,
  ncclProfilerProxyOpSendDone = 3,
  ncclProfilerProxyOpRecvPosted = 4,
  ncclProfilerProxyOpRecvReceived = 5,
  ncclProfilerProxyOpRecvTransmitted = 6,
  ncclProfilerProxyOpRecvDone = 7,
  ncclProfilerProxyStepSendGPUWait = 8,
  ncclProfilerProxyStepSendWait = 9,
  ncclProfilerProxyStepRecvWait = 10,
  ncclProfilerProxyStepRecvFlushWait = 11,
  ncclProfilerProxyStepRecvGPUWait = 12,
  ncclProfilerProxyCtrlIdle = 13,
  ncclProfilerProxyCtrlActive = 14,
  ncclProfilerProxyCtrlSleep = 15,
  ncclProfilerProxyCtrlWakeup = 16,
  ncclProfilerProxyCtrlAppend = 17,
  ncclProfilerProxyCtrlAppendEnd = 18,
  ncclProfilerProxyOpInProgress_v4 = 19, /* from v4 */
  ncclProfilerProxyStepSendPeerWait_v4 = 20,
  ncclProfilerNetPluginUpdate = 21,
  ncclProfilerKernelChStop = 22,
  ncclProfilerGroupStartApiStop = 23, /* from v5 */
  ncclProfilerGroupEndApiStart = 24,
  ncclProfilerCeCollStart = 25, /* from v6 */
  ncclProfilerCeCollComplete = 26,
  ncclProfilerCeSyncStart = 27,
  ncclProfilerCeSyncComplete = 28,
  ncclProfilerCeBatchStart = 29,
  ncclProfilerCeBatchComplete = 30,
  ncclProfilerKernelPhaseStop = 31 /* from v7 */
} ncclProfilerEventState_t;

/* ---- who speaks in a NetPlugin event: the transport's kind in the upper half, its struct version below ----- */

#define NCCL_PROFILER_NET_VER_BITS 16
#define NCCL_PROFILER_NET_VER_MASK 0xffff
#define NCCL_PROFILER_NET_TYPE_IB (1 << 16)
#define NCCL_PROFILER_NET_TYPE_SOCK (2 << 16)
#define NCCL_PROFILER_NET_IB_VER 1
#define NCCL_PROFILER_NET_SOCKET_VER 1

#define ncclProfileQp 1
#define ncclProfileSocket 1

/* One work request of an RDMA queue pair. */
typedef struct {
  int device;
  uint64_t wr_id;
  int opcode; /* as in ibv_wr_opcode */
  int qpNum;
  size_t length;
} ncclProfilerNetIbQp_v1_t;

typedef struct {
  uint8_t type; /* ncclProfileQp */
  ncclProfilerNetIbQp_v1_t qp;
} ncclProfilerNetIbDescr_v1_t;

/* One part of a transfer on one socket. */
typedef struct {
  int fd;
  int op; /* 0 send, 1 receive, as in NCCL_SOCKET_SEND and _RECV */
  size_t length;
} ncclProfilerNetSockPart_v1_t;

typedef struct {
  uint8_t type; /* ncclProfileSocket */
  ncclProfilerNetSockPart_v1_t sock;
} ncclProfilerNetSockDescr_v1_t;

/* ---- members of the descriptors ---------------------------------------------------------------------------- */

typedef struct {
  const char *name; /* the communicator's name, or NULL */
  uint64_t commHash;
  uint64_t seqNumber;
  uint8_t func;
  const void *sendBuff;
  void *recvBuff;
  size_t count;
  int root;
  uint8_t datatype;
  uint32_t op;
  size_t trafficBytes;
  uint8_t nMaxChannels;
  uint8_t nWarps;
  uint8_t algo;
  uint8_t proto;
  int isCollnet;
  int isNvls;
} ncclProfilerColl_v1_t;

typedef struct {
  const char *name;
  uint64_t commHash;
  uint64_t seqNumber;
  const char *func;
  const void *sendBuff;
  void *recvBuff;
  size_t count;
  int root;
  const char *datatype;
  size_t trafficBytes;
  uint8_t nMaxChannels;
  uint8_t nWarps;
  const char *algo;
  const char *proto;
} ncclProfilerColl_v2_t;

typedef struct {
  const char *name;
  uint64_t commHash;
  uint64_t seqNumber;
  const char *func;
  const void *sendBuff;
  void *recvBuff;
  size_t count;
  int root;
  const char *datatype;
  uint8_t nMaxChannels;
  uint8_t nWarps;
  const char *algo;
  const char *proto;
} ncclProfilerColl_v3_t;

typedef struct {
  uint64_t seqNumber;
  const char *func;
  const void *sendBuff;
  void *recvBuff;
  size_t count;
  int root;
  const char *datatype;
  uint8_t nChannels;
  uint8_t nWarps;
  const char *algo;
  const char *proto;
} ncclProfilerColl_v4_t;

typedef struct {
  uint64_t seqNumber;
  const char *func;
  const void *sendBuff;
  void *recvBuff;
  size_t count;
  int root;
  const char *datatype;
  uint8_t nChannels;
  uint8_t nWarps;
  const char *algo;
  const char *proto;
  void *parentGroup; /* the group event; parentObj is the API event from v5 on */
} ncclProfilerColl_v5_t;

typedef struct {
  const char *name;
  uint64_t commHash;
  uint8_t func;
  void *buff;
  uint8_t datatype;
  size_t count;
  int peer;
} ncclProfilerP2p_v1_t;

typedef struct {
  const char *name;
  uint64_t commHash;
  const char *func;
  void *buff;
  const char *datatype;
  size_t count;
  int peer;
} ncclProfilerP2p_v2_t;

typedef struct {
  const char *func;
  void *buff;
  const char *datatype;
  size_t count;
  int peer;
  uint8_t nChannels;
} ncclProfilerP2p_v4_t;

typedef struct {
  const char *func;
  void *buff;
  const char *datatype;
  size_t count;
  int peer;
  uint8_t nChannels;
  void *parentGroup;
} ncclProfilerP2p_v5_t;

typedef struct {
  ncclPid_t pid; /* the process that enqueued the operation; may not be this one */
  uint8_t channelId;
  int peer;
  int nSteps;
  int chunkSize;
  int isSend;
} ncclProfilerProxyOp_v1_t;

typedef struct {
  int step;
} ncclProfilerProxyStep_v1_t;

typedef struct {
  uint8_t channelId;
} ncclProfilerKernelCh_v3_t;

typedef struct {
  uint8_t channelId;
  uint64_t pTimer; /* the GPU's global timer, nanoseconds */
} ncclProfilerKernelCh_v4_t;

typedef struct {
  int64_t id; /* NCCL_PROFILER_NET_TYPE_* | version, or a plugin's own */
  void *data; /* what the plugin handed to the callback */
} ncclProfilerNetPlugin_v3_t;

typedef struct {
  bool graphCaptured;
  int groupDepth;
} ncclProfilerGroupApi_v5_t;

typedef struct {
  const char *func;
  size_t count;
  const char *datatype;
  int root;
  void *stream;
  bool graphCaptured;
} ncclProfilerCollApi_v5_t;

typedef struct {
  const char *func;
  size_t count;
  const char *datatype;
  void *stream;
  bool graphCaptured;
} ncclProfilerP2pApi_v5_t;

typedef struct {
  void *stream;
} ncclProfilerKernelLaunch_v5_t;

typedef struct {
  uint64_t seqNumber;
  const char *func;
  const void *sendBuff;
  void *recvBuff;
  size_t count;
  int root;
  const char *datatype;
  const char *syncStrategy;
  bool intraBatchSync;
  uint32_t batchSize;
  uint32_t numBatches;
  uint32_t ceSeqNum;
  void *stream;
} ncclProfilerCeColl_v6_t;

typedef struct {
  bool isComplete;
  int nRanks;
} ncclProfilerCeCollSync_v6_t;

typedef struct {
  int numOps;
  size_t totalBytes;
  bool useIntraSync;
} ncclProfilerCeCollBatch_v6_t;

/* v7 adds members at the ends of v5's and v6's structures. A tag of 0 stands for "none". */

typedef struct {
  const char *func;
  size_t count;
  const char *datatype;
  int root;
  void *stream;
  bool graphCaptured;
  uint64_t userTag;
} ncclProfilerCollApi_v7_t;

typedef struct {
  const char *func;
  size_t count;
  const char *datatype;
  void *stream;
  bool graphCaptured;
  uint64_t userTag;
} ncclProfilerP2pApi_v7_t;

typedef struct {
  uint64_t seqNumber;
  const char *func;
  const void *sendBuff;
  void *recvBuff;
  size_t count;
  int root;
  const char *datatype;
  uint8_t nChannels;
  uint8_t nWarps;
  const char *algo;
  const char *proto;
  void *parentGroup;
  const char *kernelVariant;
  bool isSymColl;
  uint64_t userTag;
} ncclProfilerColl_v7_t;

typedef struct {
  const char *func;
  void *buff;
  const char *datatype;
  size_t count;
  int peer;
  uint8_t nChannels;
  void *parentGroup;
  uint64_t userTag;
} ncclProfilerP2p_v7_t;

typedef struct {
  uint64_t seqNumber;
  const char *func;
  const void *sendBuff;
  void *recvBuff;
  size_t count;
  int root;
  const char *datatype;
  const char *syncStrategy;
  bool intraBatchSync;
  uint32_t batchSize;
  uint32_t numBatches;
  uint32_t ceSeqNum;
  void *stream;
  uint64_t userTag;
} ncclProfilerCeColl_v7_t;

/* A part of a kernel, by the GPU's clock. */
typedef struct {
  uint8_t channelId;
  uint8_t phaseId;
  const char *phaseName;
  uint64_t pTimer;
} ncclProfilerKernelPhase_v7_t;

/* ---- the descriptors: what startEvent is told -------------------------------------------------------------- */

typedef struct {
  uint8_t type;
  void *parentObj;
  int rank;
  union {
    ncclProfilerColl_v1_t coll;
    ncclProfilerP2p_v1_t p2p;
    ncclProfilerProxyOp_v1_t proxyOp;
    ncclProfilerProxyStep_v1_t proxyStep;
  } u;
} ncclProfilerEventDescr_v1_t;

typedef struct {
  uint8_t type;
  void *parentObj;
  int rank;
  union {
    ncclProfilerColl_v2_t coll;
    ncclProfilerP2p_v2_t p2p;
    ncclProfilerProxyOp_v1_t proxyOp;
    ncclProfilerProxyStep_v1_t proxyStep;
  } u;
} ncclProfilerEventDescr_v2_t;

typedef struct {
  uint8_t type;
  void *parentObj;
  int rank;
  union {
    ncclProfilerColl_v3_t coll;
    ncclProfilerP2p_v2_t p2p;
    ncclProfilerProxyOp_v1_t proxyOp;
    ncclProfilerProxyStep_v1_t proxyStep;
    ncclProfilerKernelCh_v3_t kernelCh;
    ncclProfilerNetPlugin_v3_t netPlugin;
  } u;
} ncclProfilerEventDescr_v3_t;

typedef struct {
  uint8_t type;
  void *parentObj;
  int rank;
  union {
    ncclProfilerColl_v4_t coll;
    ncclProfilerP2p_v4_t p2p;
    ncclProfilerProxyOp_v1_t proxyOp;
    ncclProfilerProxyStep_v1_t proxyStep;
    ncclProfilerKernelCh_v4_t kernelCh;
    ncclProfilerNetPlugin_v3_t netPlugin;
  } u;
} ncclProfilerEventDescr_v4_t;

typedef struct {
  uint64_t type;
  void *parentObj;
  int rank;
  union {
    ncclProfilerGroupApi_v5_t groupApi;
    ncclProfilerCollApi_v5_t collApi;
    ncclProfilerP2pApi_v5_t p2pApi;
    ncclProfilerKernelLaunch_v5_t kernelLaunch;
    ncclProfilerColl_v5_t coll;
    ncclProfilerP2p_v5_t p2p;
    ncclProfilerProxyOp_v1_t proxyOp;
    ncclProfilerProxyStep_v1_t proxyStep;
    ncclProfilerKernelCh_v4_t kernelCh;
    ncclProfilerNetPlugin_v3_t netPlugin;
  } u;
} ncclProfilerEventDescr_v5_t;

typedef struct {
  uint64_t type;
  void *parentObj;
  int rank;
  union {
    ncclProfilerGroupApi_v5_t groupApi;
    ncclProfilerCollApi_v5_t collApi;
    ncclProfilerP2pApi_v5_t p2pApi;
    ncclProfilerKernelLaunch_v5_t kernelLaunch;
    ncclProfilerColl_v5_t coll;
    ncclProfilerP2p_v5_t p2p;
    ncclProfilerProxyOp_v1_t proxyOp;
    ncclProfilerProxyStep_v1_t proxyStep;
    ncclProfilerKernelCh_v4_t kernelCh;
    ncclProfilerNetPlugin_v3_t netPlugin;
    ncclProfilerCeColl_v6_t ceColl;
    ncclProfilerCeCollSync_v6_t ceCollSync;
    ncclProfilerCeCollBatch_v6_t ceCollBatch;
  } u;
} ncclProfilerEventDescr_v6_t;

typedef struct {
  uint64_t type;
  void *parentObj;
  int rank;
  union {
    ncclProfilerGroupApi_v5_t groupApi;
    ncclProfilerCollApi_v7_t collApi;
    ncclProfilerP2pApi_v7_t p2pApi;
    ncclProfilerKernelLaunch_v5_t kernelLaunch;
    ncclProfilerColl_v7_t coll;
    ncclProfilerP2p_v7_t p2p;
    ncclProfilerProxyOp_v1_t proxyOp;
    ncclProfilerProxyStep_v1_t proxyStep;
    ncclProfilerKernelCh_v4_t kernelCh;
    ncclProfilerNetPlugin_v3_t netPlugin;
    ncclProfilerCeColl_v7_t ceColl;
    ncclProfilerCeCollSync_v6_t ceCollSync;
    ncclProfilerCeCollBatch_v6_t ceCollBatch;
    ncclProfilerKernelPhase_v7_t kernelPhase;
  } u;
} ncclProfilerEventDescr_v7_t;

/* ---- the arguments of recordEventState (may be NULL) -------------------------------------------------------- */

typedef union {
  struct {
    size_t transSize;
    int steps;
  } proxyOp;
  struct {
    int appendedProxyOps;
  } proxyCtrl;
} ncclProfilerEventStateArgs_v1_t;

typedef ncclProfilerEventStateArgs_v1_t ncclProfilerEventStateArgs_v2_t;
typedef ncclProfilerEventStateArgs_v1_t ncclProfilerEventStateArgs_v3_t;

typedef union {
  struct {
    size_t transSize;
  } proxyStep;
  struct {
    int appendedProxyOps;
  } proxyCtrl;
  struct {
    void *data;
  } netPlugin;
  struct {
    uint64_t pTimer;
  } kernelCh;
} ncclProfilerEventStateArgs_v4_t;

typedef ncclProfilerEventStateArgs_v4_t ncclProfilerEventStateArgs_v5_t;
typedef ncclProfilerEventStateArgs_v4_t ncclProfilerEventStateArgs_v6_t;
typedef ncclProfilerEventStateArgs_v4_t ncclProfilerEventStateArgs_v7_t;

/* ---- function types ------------------------------------------------------------------------------------------ */

typedef ncclResult_t (*ncclProfilerInit_v1_fn)(void **context, int *activationMask);
typedef ncclResult_t (*ncclProfilerInit_v4_fn)(void **context, int *activationMask, const char *commName,
                                               uint64_t commHash, int nNodes, int nRanks, int rank,
                                               ncclDebugLogger_t log);
typedef ncclResult_t (*ncclProfilerInit_v5_fn)(void **context, uint64_t commId, int *activationMask,
                                               const char *commName, int nNodes, int nRanks, int rank,
                                               ncclDebugLogger_t log);
typedef ncclResult_t (*ncclProfilerStartEvent_v1_fn)(void *context, void **event, ncclProfilerEventDescr_v1_t *descr);
typedef ncclResult_t (*ncclProfilerStartEvent_v2_fn)(void *context, void **event, ncclProfilerEventDescr_v2_t *descr);
typedef ncclResult_t (*ncclProfilerStartEvent_v3_fn)(void *context, void **event, ncclProfilerEventDescr_v3_t *descr);
typedef ncclResult_t (*ncclProfilerStartEvent_v4_fn)(void *context, void **event, ncclProfilerEventDescr_v4_t *descr);
typedef ncclResult_t (*ncclProfilerStartEvent_v5_fn)(void *context, void **event, ncclProfilerEventDescr_v5_t *descr);
typedef ncclResult_t (*ncclProfilerStartEvent_v6_fn)(void *context, void **event, ncclProfilerEventDescr_v6_t *descr);
typedef ncclResult_t (*ncclProfilerStartEvent_v7_fn)(void *context, void **event, ncclProfilerEventDescr_v7_t *descr);
typedef ncclResult_t (*ncclProfilerStopEvent_v1_fn)(void *event);
typedef ncclResult_t (*ncclProfilerRecordEventState_v1_fn)(void *event, ncclProfilerEventState_t state,
                                                           ncclProfilerEventStateArgs_v1_t *args);
typedef ncclResult_t (*ncclProfilerRecordEventState_v4_fn)(void *event, ncclProfilerEventState_t state,
                                                           ncclProfilerEventStateArgs_v4_t *args);
typedef ncclResult_t (*ncclProfilerFinalize_v1_fn)(void *context);

/* ---- the tables ---------------------------------------------------------------------------------------------- */

typedef struct {
  const char *name;
  ncclProfilerInit_v1_fn init;
  ncclProfilerStartEvent_v1_fn startEvent;
  ncclProfilerStopEvent_v1_fn stopEvent;
  ncclProfilerRecordEventState_v1_fn recordEventState;
  ncclProfilerFinalize_v1_fn finalize;
} ncclProfiler_v1_t;

typedef struct {
  const char *name;
  ncclProfilerInit_v1_fn init;
  ncclProfilerStartEvent_v2_fn startEvent;
  ncclProfilerStopEvent_v1_fn stopEvent;
  ncclProfilerRecordEventState_v1_fn recordEventState;
  ncclProfilerFinalize_v1_fn finalize;
} ncclProfiler_v2_t;

typedef struct {
  const char *name;
  ncclProfilerInit_v1_fn init;
  ncclProfilerStartEvent_v3_fn startEvent;
  ncclProfilerStopEvent_v1_fn stopEvent;
  ncclProfilerRecordEventState_v1_fn recordEventState;
  ncclProfilerFinalize_v1_fn finalize;
} ncclProfiler_v3_t;

typedef struct {
  const char *name;
  ncclProfilerInit_v4_fn init;
  ncclProfilerStartEvent_v4_fn startEvent;
  ncclProfilerStopEvent_v1_fn stopEvent;
  ncclProfilerRecordEventState_v4_fn recordEventState;
  ncclProfilerFinalize_v1_fn finalize;
} ncclProfiler_v4_t;

typedef struct {
  const char *name;
  ncclProfilerInit_v5_fn init;
  ncclProfilerStartEvent_v5_fn startEvent;
  ncclProfilerStopEvent_v1_fn stopEvent;
  ncclProfilerRecordEventState_v4_fn recordEventState;
  ncclProfilerFinalize_v1_fn finalize;
} ncclProfiler_v5_t;

typedef struct {
  const char *name;
  ncclProfilerInit_v5_fn init;
  ncclProfilerStartEvent_v6_fn startEvent;
  ncclProfilerStopEvent_v1_fn stopEvent;
  ncclProfilerRecordEventState_v4_fn recordEventState;
  ncclProfilerFinalize_v1_fn finalize;
} ncclProfiler_v6_t;

typedef struct {
  const char *name;
  ncclProfilerInit_v5_fn init;
  ncclProfilerStartEvent_v7_fn startEvent;
  ncclProfilerStopEvent_v1_fn stopEvent;
  ncclProfilerRecordEventState_v4_fn recordEventState;
  ncclProfilerFinalize_v1_fn finalize;
} ncclProfiler_v7_t;

#endif
