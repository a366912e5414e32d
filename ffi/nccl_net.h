/*
 * The network half of NCCL's plugin interface, stated in our own words.
 *
 * One function type per signature, named after the first interface version that has it, so that each version's
 * table below shows at a glance what it shares with the one before. The sizes and offsets of every struct here are
 * checked against NCCL's by tests/abi/layout.rs.
 *
 *   NCCL 2.8-2.11 loads v4, 2.12 v5, 2.13-2.18 v6, 2.19 v7, 2.20-2.23 v8, 2.24-2.25 v9, 2.26-2.27 v10,
 *   2.28-2.29 v11, 2.30 and later v12. A release also loads some versions older than its own.
 */
#ifndef TOWLINE_NCCL_NET_H
#define TOWLINE_NCCL_NET_H

#include <stddef.h>
#include <stdint.h>

/* ---- result codes, logging, profiler callback ------------------------------------------------------------- */

typedef enum {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6 /* known from NCCL 2.13 on, that is to hosts of v6 and later */
} ncclResult_t;

typedef enum {
  NCCL_LOG_NONE = 0,
  NCCL_LOG_VERSION = 1,
  NCCL_LOG_WARN = 2,
  NCCL_LOG_INFO = 3,
  NCCL_LOG_ABORT = 4,
  NCCL_LOG_TRACE = 5
} ncclDebugLogLevel;

/* Bits of the logger's `flags`: which part of the system a line belongs to (NCCL_DEBUG_SUBSYS selects). */
enum {
  NCCL_INIT = 1 << 0,
  NCCL_COLL = 1 << 1,
  NCCL_P2P = 1 << 2,
  NCCL_SHM = 1 << 3,
  NCCL_NET = 1 << 4,
  NCCL_GRAPH = 1 << 5,
  NCCL_TUNING = 1 << 6,
  NCCL_ENV = 1 << 7,
  NCCL_ALLOC = 1 << 8,
  NCCL_CALL = 1 << 9,
  NCCL_PROXY = 1 << 10,
  NCCL_NVLS = 1 << 11,
  NCCL_BOOTSTRAP = 1 << 12,
  NCCL_REG = 1 << 13,
  NCCL_PROFILE = 1 << 14,
  NCCL_RAS = 1 << 15,
  NCCL_DESTROY = 1 << 16,
  NCCL_ALLOC_HOST = 1 << 17
};

/* NCCL's logger: a printf-like function that filters by level and flags itself. May be called from any thread. */
typedef void (*ncclDebugLogger_t)(ncclDebugLogLevel level, unsigned long flags, const char *file, int line,
                                  const char *format, ...);

/* What a call of the profiler callback asks for. */
#define ncclProfilerNetEventStart 0
#define ncclProfilerNetEventStop 1
#define ncclProfilerNetEventUpdate 2
#define ncclProfilerNetEventUpdateAndStop 3

/* The way back into NCCL's profiler (v10 and later). START writes *event; the other kinds read it. */
typedef ncclResult_t (*ncclProfilerCallback_t)(void **event, int kind, void *transfer, int64_t pluginId,
                                               void *description);

/* ---- constants -------------------------------------------------------------------------------------------- */

#define NCCL_PTR_HOST 1
#define NCCL_PTR_CUDA 2
#define NCCL_PTR_DMABUF 4

#define NCCL_NET_HANDLE_MAXSIZE_V4 64 /* bytes of a connection handle in v4; later versions give 128 */
#define NCCL_NET_HANDLE_MAXSIZE 128
#define NCCL_NET_MAX_REQUESTS 32 /* outstanding requests per connection from NCCL 2.19 on; 8 before */
#define NCCL_NET_MAX_DEVS_PER_NIC_V9 4
#define NCCL_NET_MAX_DEVS_PER_NIC_V12 8

#define NCCL_NET_TRAFFIC_CLASS_UNDEF (-1)
#define NCCL_NET_ID_UNDEF (-1) /* rail or plane unknown */

/* Values that *request may hold on entry to irecv (v9 and later): hints, to be overwritten. */
#define NCCL_NET_OPTIONAL_RECV_COMPLETION 1
#define NCCL_NET_MULTI_REQUEST 2

/* The most that NCCL accepts for maxP2pBytes and maxCollBytes: 1 TiB. */
#define NCCL_MAX_NET_SIZE_BYTES 1099511627776

/* ---- device offload (v7 and later): who moves the data, the host or code on the GPU ----------------------- */

typedef enum {
  NCCL_NET_DEVICE_HOST = 0,
  NCCL_NET_DEVICE_UNPACK = 1,
  NCCL_NET_DEVICE_GIN_PROXY = 2,
  NCCL_NET_DEVICE_GIN_GDAKI = 3
} ncclNetDeviceType;

#define NCCL_NET_DEVICE_INVALID_VERSION 0

typedef struct {
  ncclNetDeviceType netDeviceType;
  int netDeviceVersion;
  void *handle;
  size_t size;
  int needsProxyProgress;
} ncclNetDeviceHandle_v7_t;

typedef ncclNetDeviceHandle_v7_t ncclNetDeviceHandle_v8_t;
typedef ncclNetDeviceHandle_v7_t ncclNetDeviceHandle_v9_t;
typedef ncclNetDeviceHandle_v7_t ncclNetDeviceHandle_v10_t;
typedef ncclNetDeviceHandle_v7_t ncclNetDeviceHandle_v11_t;
typedef ncclNetDeviceHandle_v7_t ncclNetDeviceHandle_v12_t;

/* ---- virtual devices, communicator configuration, traffic attributes -------------------------------------- */

typedef struct {
  int ndevs;
  int devs[NCCL_NET_MAX_DEVS_PER_NIC_V9];
} ncclNetVDeviceProps_v9_t;

typedef ncclNetVDeviceProps_v9_t ncclNetVDeviceProps_v10_t;
typedef ncclNetVDeviceProps_v9_t ncclNetVDeviceProps_v11_t;

typedef struct {
  int ndevs;
  int devs[NCCL_NET_MAX_DEVS_PER_NIC_V12];
} ncclNetVDeviceProps_v12_t;

typedef struct {
  int trafficClass; /* the whole ToS / traffic-class byte, or NCCL_NET_TRAFFIC_CLASS_UNDEF */
} ncclNetCommConfig_v10_t;

typedef ncclNetCommConfig_v10_t ncclNetCommConfig_v11_t;
typedef ncclNetCommConfig_v10_t ncclNetCommConfig_v12_t;

typedef struct {
  int32_t maxConcurrentPeers;
  int32_t minConcurrentPeers;
  int32_t maxFlowsPerPeer;
  int32_t minFlowsPerPeer;
} ncclNetCommAttr_v11_t;

typedef ncclNetCommAttr_v11_t ncclNetCommAttr_v12_t;

typedef struct {
  ncclNetCommAttr_v11_t sendCommAttr;
  ncclNetCommAttr_v11_t recvCommAttr;
  uint32_t op;
  uint32_t algo;
  uint32_t proto;
} ncclNetAttr_v11_t;

typedef ncclNetAttr_v11_t ncclNetAttr_v12_t;

/* ---- device properties ------------------------------------------------------------------------------------ */

typedef struct {
  const char *name;
  const char *pciPath; /* the device's directory in /sys, or NULL */
  uint64_t guid;       /* equal for the functions of one physical card */
  int ptrSupport;      /* NCCL_PTR_* bits */
  int speed;           /* megabits per second */
  int port;
  int maxComms;
} ncclNetProperties_v4_t;

typedef struct {
  const char *name;
  const char *pciPath;
  uint64_t guid;
  int ptrSupport;
  int speed;
  int port;
  float latency; /* microseconds; 0 when unknown */
  int maxComms;
  int maxRecvs; /* the largest group of receives */
} ncclNetProperties_v6_t;

typedef ncclNetProperties_v6_t ncclNetProperties_v5_t;

typedef struct {
  const char *name;
  const char *pciPath;
  uint64_t guid;
  int ptrSupport;
  int speed;
  int port;
  float latency;
  int maxComms;
  int maxRecvs;
  ncclNetDeviceType netDeviceType;
  int netDeviceVersion;
} ncclNetProperties_v7_t;

typedef struct {
  const char *name;
  const char *pciPath;
  uint64_t guid;
  int ptrSupport;
  int regIsGlobal; /* a registration holds for every connection of the device */
  int speed;
  int port;
  float latency;
  int maxComms;
  int maxRecvs;
  ncclNetDeviceType netDeviceType;
  int netDeviceVersion;
} ncclNetProperties_v8_t;

typedef struct {
  const char *name;
  const char *pciPath;
  uint64_t guid;
  int ptrSupport;
  int regIsGlobal;
  int forceFlush; /* flush after every receive into GPU memory */
  int speed;
  int port;
  float latency;
  int maxComms;
  int maxRecvs;
  ncclNetDeviceType netDeviceType;
  int netDeviceVersion;
  ncclNetVDeviceProps_v9_t vProps; /* a physical device names itself alone */
  size_t maxP2pBytes;
  size_t maxCollBytes;
} ncclNetProperties_v9_t;

typedef ncclNetProperties_v9_t ncclNetProperties_v10_t;

typedef struct {
  const char *name;
  const char *pciPath;
  uint64_t guid;
  int ptrSupport;
  int regIsGlobal;
  int forceFlush;
  int speed;
  int port;
  float latency;
  int maxComms;
  int maxRecvs;
  ncclNetDeviceType netDeviceType;
  int netDeviceVersion;
  ncclNetVDeviceProps_v11_t vProps;
  size_t maxP2pBytes;
  size_t maxCollBytes;
  int maxMultiRequestSize;
} ncclNetProperties_v11_t;

typedef struct {
  const char *name;
  const char *pciPath;
  uint64_t guid;
  int ptrSupport;
  int regIsGlobal;
  int forceFlush;
  int speed;
  int port;
  float latency;
  int maxComms;
  int maxRecvs;
  ncclNetDeviceType netDeviceType;
  int netDeviceVersion;
  ncclNetVDeviceProps_v12_t vProps;
  size_t maxP2pBytes;
  size_t maxCollBytes;
  int maxMultiRequestSize;
  int16_t railId;
  int16_t planeId;
} ncclNetProperties_v12_t;

/* ---- function types: set-up ------------------------------------------------------------------------------- */

typedef ncclResult_t (*ncclNetInit_v4_fn)(ncclDebugLogger_t log);
typedef ncclResult_t (*ncclNetInit_v10_fn)(ncclDebugLogger_t log, ncclProfilerCallback_t profiler);
typedef ncclResult_t (*ncclNetInit_v11_fn)(void **ctx, uint64_t commId, ncclNetCommConfig_v11_t *config,
                                           ncclDebugLogger_t log, ncclProfilerCallback_t profiler);
typedef ncclResult_t (*ncclNetFinalize_v11_fn)(void *ctx);
typedef ncclResult_t (*ncclNetSetNetAttr_v11_fn)(void *ctx, ncclNetAttr_v11_t *attr);

typedef ncclResult_t (*ncclNetDevices_v4_fn)(int *count);
typedef ncclResult_t (*ncclNetGetProperties_v4_fn)(int dev, ncclNetProperties_v4_t *props);
typedef ncclResult_t (*ncclNetGetProperties_v6_fn)(int dev, ncclNetProperties_v6_t *props);
typedef ncclResult_t (*ncclNetGetProperties_v7_fn)(int dev, ncclNetProperties_v7_t *props);
typedef ncclResult_t (*ncclNetGetProperties_v8_fn)(int dev, ncclNetProperties_v8_t *props);
typedef ncclResult_t (*ncclNetGetProperties_v9_fn)(int dev, ncclNetProperties_v9_t *props);
typedef ncclResult_t (*ncclNetGetProperties_v11_fn)(int dev, ncclNetProperties_v11_t *props);
typedef ncclResult_t (*ncclNetGetProperties_v12_fn)(int dev, ncclNetProperties_v12_t *props);
typedef ncclResult_t (*ncclNetMakeVDevice_v9_fn)(int *dev, ncclNetVDeviceProps_v9_t *members);
typedef ncclResult_t (*ncclNetMakeVDevice_v12_fn)(int *dev, ncclNetVDeviceProps_v12_t *members);

/* ---- function types: connections -------------------------------------------------------------------------- */
/* v4 waits inside connect and accept. From v5 on both return at once, with a NULL connection while it is not
 * ready, and are called again. */

typedef ncclResult_t (*ncclNetListen_v4_fn)(int dev, void *handle, void **listenComm);
typedef ncclResult_t (*ncclNetListen_v11_fn)(void *ctx, int dev, void *handle, void **listenComm);
typedef ncclResult_t (*ncclNetConnect_v4_fn)(int dev, void *handle, void **sendComm);
typedef ncclResult_t (*ncclNetConnect_v7_fn)(int dev, void *handle, void **sendComm,
                                             ncclNetDeviceHandle_v7_t **sendDevComm);
typedef ncclResult_t (*ncclNetConnect_v10_fn)(int dev, ncclNetCommConfig_v10_t *config, void *handle,
                                              void **sendComm, ncclNetDeviceHandle_v10_t **sendDevComm);
typedef ncclResult_t (*ncclNetConnect_v11_fn)(void *ctx, int dev, void *handle, void **sendComm,
                                              ncclNetDeviceHandle_v11_t **sendDevComm);
typedef ncclResult_t (*ncclNetAccept_v4_fn)(void *listenComm, void **recvComm);
typedef ncclResult_t (*ncclNetAccept_v7_fn)(void *listenComm, void **recvComm, ncclNetDeviceHandle_v7_t **recvDevComm);
typedef ncclResult_t (*ncclNetClose_v4_fn)(void *comm);

/* ---- function types: memory ------------------------------------------------------------------------------- */

typedef ncclResult_t (*ncclNetRegMr_v4_fn)(void *comm, void *data, int size, int type, void **mhandle);
typedef ncclResult_t (*ncclNetRegMr_v8_fn)(void *comm, void *data, size_t size, int type, void **mhandle);
typedef ncclResult_t (*ncclNetRegMrDmaBuf_v6_fn)(void *comm, void *data, size_t size, int type, uint64_t offset, int fd,
                                                 void **mhandle);
typedef ncclResult_t (*ncclNetDeregMr_v4_fn)(void *comm, void *mhandle);
typedef ncclResult_t (*ncclNetGetDeviceMr_v7_fn)(void *comm, void *mhandle, void **deviceMhandle);

/* ---- function types: transfers ---------------------------------------------------------------------------- */
/* A NULL *request from isend or irecv means "not now, call again"; from iflush, "nothing to wait for". */

typedef ncclResult_t (*ncclNetIsend_v4_fn)(void *sendComm, void *data, int size, void *mhandle, void **request);
typedef ncclResult_t (*ncclNetIsend_v5_fn)(void *sendComm, void *data, int size, int tag, void *mhandle,
                                           void **request);
typedef ncclResult_t (*ncclNetIsend_v9_fn)(void *sendComm, void *data, size_t size, int tag, void *mhandle,
                                           void **request);
typedef ncclResult_t (*ncclNetIsend_v10_fn)(void *sendComm, void *data, size_t size, int tag, void *mhandle,
                                            void *phandle, void **request);
typedef ncclResult_t (*ncclNetIrecv_v4_fn)(void *recvComm, void *data, int size, void *mhandle, void **request);
typedef ncclResult_t (*ncclNetIrecv_v5_fn)(void *recvComm, int n, void **data, int *sizes, int *tags, void **mhandles,
                                           void **request);
typedef ncclResult_t (*ncclNetIrecv_v9_fn)(void *recvComm, int n, void **data, size_t *sizes, int *tags,
                                           void **mhandles, void **request);
typedef ncclResult_t (*ncclNetIrecv_v10_fn)(void *recvComm, int n, void **data, size_t *sizes, int *tags,
                                            void **mhandles, void **phandles, void **request);
typedef ncclResult_t (*ncclNetIrecvConsumed_v7_fn)(void *recvComm, int n, void *request);
typedef ncclResult_t (*ncclNetIflush_v4_fn)(void *recvComm, void *data, int size, void *mhandle, void **request);
typedef ncclResult_t (*ncclNetIflush_v5_fn)(void *recvComm, int n, void **data, int *sizes, void **mhandles,
                                            void **request);
typedef ncclResult_t (*ncclNetTest_v4_fn)(void *request, int *done, int *sizes);

/* ---- the tables ------------------------------------------------------------------------------------------- */

typedef struct {
  const char *name;
  ncclNetInit_v4_fn init;
  ncclNetDevices_v4_fn devices;
  ncclNetGetProperties_v4_fn getProperties;
  ncclNetListen_v4_fn listen;
  ncclNetConnect_v4_fn connect;
  ncclNetAccept_v4_fn accept;
  ncclNetRegMr_v4_fn regMr;
  ncclNetDeregMr_v4_fn deregMr;
  ncclNetIsend_v4_fn isend;
  ncclNetIrecv_v4_fn irecv;
  ncclNetIflush_v4_fn iflush;
  ncclNetTest_v4_fn test;
  ncclNetClose_v4_fn closeSend;
  ncclNetClose_v4_fn closeRecv;
  ncclNetClose_v4_fn closeListen;
} ncclNet_v4_t;

typedef struct {
  const char *name;
  ncclNetInit_v4_fn init;
  ncclNetDevices_v4_fn devices;
  ncclNetGetProperties_v6_fn getProperties;
  ncclNetListen_v4_fn listen;
  ncclNetConnect_v4_fn connect;
  ncclNetAccept_v4_fn accept;
  ncclNetRegMr_v4_fn regMr;
  ncclNetDeregMr_v4_fn deregMr;
  ncclNetIsend_v5_fn isend;
  ncclNetIrecv_v5_fn irecv;
  ncclNetIflush_v5_fn iflush;
  ncclNetTest_v4_fn test;
  ncclNetClose_v4_fn closeSend;
  ncclNetClose_v4_fn closeRecv;
  ncclNetClose_v4_fn closeListen;
} ncclNet_v5_t;

typedef struct {
  const char *name;
  ncclNetInit_v4_fn init;
  ncclNetDevices_v4_fn devices;
  ncclNetGetProperties_v6_fn getProperties;
  ncclNetListen_v4_fn listen;
  ncclNetConnect_v4_fn connect;
  ncclNetAccept_v4_fn accept;
  ncclNetRegMr_v4_fn regMr;
  ncclNetRegMrDmaBuf_v6_fn regMrDmaBuf;
  ncclNetDeregMr_v4_fn deregMr;
  ncclNetIsend_v5_fn isend;
  ncclNetIrecv_v5_fn irecv;
  ncclNetIflush_v5_fn iflush;
  ncclNetTest_v4_fn test;
  ncclNetClose_v4_fn closeSend;
  ncclNetClose_v4_fn closeRecv;
  ncclNetClose_v4_fn closeListen;
} ncclNet_v6_t;

typedef struct {
  const char *name;
  ncclNetInit_v4_fn init;
  ncclNetDevices_v4_fn devices;
  ncclNetGetProperties_v7_fn getProperties;
  ncclNetListen_v4_fn listen;
  ncclNetConnect_v7_fn connect;
  ncclNetAccept_v7_fn accept;
  ncclNetRegMr_v4_fn regMr;
  ncclNetRegMrDmaBuf_v6_fn regMrDmaBuf;
  ncclNetDeregMr_v4_fn deregMr;
  ncclNetIsend_v5_fn isend;
  ncclNetIrecv_v5_fn irecv;
  ncclNetIflush_v5_fn iflush;
  ncclNetTest_v4_fn test;
  ncclNetClose_v4_fn closeSend;
  ncclNetClose_v4_fn closeRecv;
  ncclNetClose_v4_fn closeListen;
  ncclNetGetDeviceMr_v7_fn getDeviceMr;
  ncclNetIrecvConsumed_v7_fn irecvConsumed;
} ncclNet_v7_t;

typedef struct {
  const char *name;
  ncclNetInit_v4_fn init;
  ncclNetDevices_v4_fn devices;
  ncclNetGetProperties_v8_fn getProperties;
  ncclNetListen_v4_fn listen;
  ncclNetConnect_v7_fn connect;
  ncclNetAccept_v7_fn accept;
  ncclNetRegMr_v8_fn regMr;
  ncclNetRegMrDmaBuf_v6_fn regMrDmaBuf;
  ncclNetDeregMr_v4_fn deregMr;
  ncclNetIsend_v5_fn isend;
  ncclNetIrecv_v5_fn irecv;
  ncclNetIflush_v5_fn iflush;
  ncclNetTest_v4_fn test;
  ncclNetClose_v4_fn closeSend;
  ncclNetClose_v4_fn closeRecv;
  ncclNetClose_v4_fn closeListen;
  ncclNetGetDeviceMr_v7_fn getDeviceMr;
  ncclNetIrecvConsumed_v7_fn irecvConsumed;
} ncclNet_v8_t;

typedef struct {
  const char *name;
  ncclNetInit_v4_fn init;
  ncclNetDevices_v4_fn devices;
  ncclNetGetProperties_v9_fn getProperties;
  ncclNetListen_v4_fn listen;
  ncclNetConnect_v7_fn connect;
  ncclNetAccept_v7_fn accept;
  ncclNetRegMr_v8_fn regMr;
  ncclNetRegMrDmaBuf_v6_fn regMrDmaBuf;
  ncclNetDeregMr_v4_fn deregMr;
  ncclNetIsend_v9_fn isend;
  ncclNetIrecv_v9_fn irecv;
  ncclNetIflush_v5_fn iflush;
  ncclNetTest_v4_fn test;
  ncclNetClose_v4_fn closeSend;
  ncclNetClose_v4_fn closeRecv;
  ncclNetClose_v4_fn closeListen;
  ncclNetGetDeviceMr_v7_fn getDeviceMr;
  ncclNetIrecvConsumed_v7_fn irecvConsumed;
  ncclNetMakeVDevice_v9_fn makeVDevice;
} ncclNet_v9_t;

typedef struct {
  const char *name;
  ncclNetInit_v10_fn init;
  ncclNetDevices_v4_fn devices;
  ncclNetGetProperties_v9_fn getProperties;
  ncclNetListen_v4_fn listen;
  ncclNetConnect_v10_fn connect;
  ncclNetAccept_v7_fn accept;
  ncclNetRegMr_v8_fn regMr;
  ncclNetRegMrDmaBuf_v6_fn regMrDmaBuf;
  ncclNetDeregMr_v4_fn deregMr;
  ncclNetIsend_v10_fn isend;
  ncclNetIrecv_v10_fn irecv;
  ncclNetIflush_v5_fn iflush;
  ncclNetTest_v4_fn test;
  ncclNetClose_v4_fn closeSend;
  ncclNetClose_v4_fn closeRecv;
  ncclNetClose_v4_fn closeListen;
  ncclNetGetDeviceMr_v7_fn getDeviceMr;
  ncclNetIrecvConsumed_v7_fn irecvConsumed;
  ncclNetMakeVDevice_v9_fn makeVDevice;
} ncclNet_v10_t;

typedef struct {
  const char *name;
  ncclNetInit_v11_fn init;
  ncclNetDevices_v4_fn devices;
  ncclNetGetProperties_v11_fn getProperties;
  ncclNetListen_v11_fn listen;
  ncclNetConnect_v11_fn connect;
  ncclNetAccept_v7_fn accept;
  ncclNetRegMr_v8_fn regMr;
  ncclNetRegMrDmaBuf_v6_fn regMrDmaBuf;
  ncclNetDeregMr_v4_fn deregMr;
  ncclNetIsend_v10_fn isend;
  ncclNetIrecv_v10_fn irecv;
  ncclNetIflush_v5_fn iflush;
  ncclNetTest_v4_fn test;
  ncclNetClose_v4_fn closeSend;
  ncclNetClose_v4_fn closeRecv;
  ncclNetClose_v4_fn closeListen;
  ncclNetGetDeviceMr_v7_fn getDeviceMr;
  ncclNetIrecvConsumed_v7_fn irecvConsumed;
  ncclNetMakeVDevice_v9_fn makeVDevice;
  ncclNetFinalize_v11_fn finalize;
  ncclNetSetNetAttr_v11_fn setNetAttr;
} ncclNet_v11_t;

typedef struct {
  const char *name;
  ncclNetInit_v11_fn init;
  ncclNetDevices_v4_fn devices;
  ncclNetGetProperties_v12_fn getProperties;
  ncclNetListen_v11_fn listen;
  ncclNetConnect_v11_fn connect;
  ncclNetAccept_v7_fn accept;
  ncclNetRegMr_v8_fn regMr;
  ncclNetRegMrDmaBuf_v6_fn regMrDmaBuf;
  ncclNetDeregMr_v4_fn deregMr;
  ncclNetIsend_v10_fn isend;
  ncclNetIrecv_v10_fn irecv;
  ncclNetIflush_v5_fn iflush;
  ncclNetTest_v4_fn test;
  ncclNetClose_v4_fn closeSend;
  ncclNetClose_v4_fn closeRecv;
  ncclNetClose_v4_fn closeListen;
  ncclNetGetDeviceMr_v7_fn getDeviceMr;
  ncclNetIrecvConsumed_v7_fn irecvConsumed;
  ncclNetMakeVDevice_v12_fn makeVDevice;
  ncclNetFinalize_v11_fn finalize;
  ncclNetSetNetAttr_v11_fn setNetAttr;
} ncclNet_v12_t;

#endif
