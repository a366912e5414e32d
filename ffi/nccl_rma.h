/*
 * The one-sided part of NCCL's plugin interface, stated in our own words.
 *
 * A put writes into memory that another rank has registered, a get reads from there, and a signal adds to a 64-bit number.
 * Registrations are collective: the handles of one window have the same place in the order of registrations on all ranks.
 * Sizes and offsets are checked against NCCL's by tests/abi/layout.rs.
 *
 *   NCCL 2.30.7 loads v14, 2.31 v15, 2.32.3 v16.
 */
#ifndef TOWLINE_NCCL_RMA_H
#define TOWLINE_NCCL_RMA_H

#include <stdbool.h>

#include "nccl_net.h"

/* Flags of a registration: it may hold signals; only the plugin writes it, and it begins with zeros. */
enum { NCCL_RMA_MR_FORCE_SO = 1, NCCL_RMA_MR_SIGNAL_NEVER_RESET = 2 };

/* What a signal does. */
enum { NCCL_RMA_SIGNAL_INC = 1, NCCL_RMA_SIGNAL_ADD = 2 };

typedef struct {
  int nContexts;
  int trafficClass;
  int rankStride;
} ncclRmaConfig_v14_t;

typedef ncclResult_t (*ncclRmaInit_v14_fn)(void **ctx, uint64_t commId, ncclDebugLogger_t logFunction);
typedef ncclResult_t (*ncclRmaGetRmaProperties_v16_fn)(void *collComm, void *props);
typedef ncclResult_t (*ncclRmaConnect_v14_fn)(void *ctx, void **handles, int nranks, int rank, void *listenComm,
                                              void **collComm);
typedef ncclResult_t (*ncclRmaCreateContext_v14_fn)(void *collComm, ncclRmaConfig_v14_t *config, void **rmaCtx);
typedef ncclResult_t (*ncclRmaRegMrSym_v14_fn)(void *collComm, void *data, size_t size, int type, uint64_t mrFlags,
                                               void **mhandle);
typedef ncclResult_t (*ncclRmaRegMrSymDmaBuf_v14_fn)(void *collComm, void *data, size_t size, int type,
                                                     uint64_t offset, int fd, uint64_t mrFlags, void **mhandle);
typedef ncclResult_t (*ncclRmaDeregMrSym_v14_fn)(void *collComm, void *mhandle);
typedef ncclResult_t (*ncclRmaEnd_v14_fn)(void *object);
typedef ncclResult_t (*ncclRmaPut_v14_fn)(void *rmaCtx, int context, uint64_t srcOff, void *srcMhandle, size_t size,
                                          uint64_t dstOff, void *dstMhandle, uint32_t rank, void **request);
typedef ncclResult_t (*ncclRmaPut_v15_fn)(void *rmaCtx, int context, uint64_t srcOff, void *srcMhandle, size_t size,
                                          uint64_t dstOff, void *dstMhandle, uint32_t rank, uint32_t optFlags,
                                          void **request);
typedef ncclResult_t (*ncclRmaPutSignal_v14_fn)(void *rmaCtx, int context, uint64_t srcOff, void *srcMhandle,
                                                size_t size, uint64_t dstOff, void *dstMhandle, uint32_t rank,
                                                uint64_t signalOff, void *signalMhandle, uint64_t signalValue,
                                                uint32_t signalOp, bool isStrongSignal, void **request);
typedef ncclResult_t (*ncclRmaPutSignal_v15_fn)(void *rmaCtx, int context, uint64_t srcOff, void *srcMhandle,
                                                size_t size, uint64_t dstOff, void *dstMhandle, uint32_t rank,
                                                uint64_t signalOff, void *signalMhandle, uint64_t signalValue,
                                                uint32_t signalOp, bool isStrongSignal, uint32_t optFlags,
                                                void **request);
typedef ncclResult_t (*ncclRmaFlush_v14_fn)(void *rmaCtx, int context, void *mhandle, uint32_t rank, void **request);
typedef ncclResult_t (*ncclRmaTest_v14_fn)(void *collComm, void *request, int *done);
typedef ncclResult_t (*ncclRmaQueryLastError_v14_fn)(void *rmaCtx, bool *hasError);

typedef struct {
  const char *name;
  ncclRmaInit_v14_fn init;
  ncclNetDevices_v4_fn devices;
  ncclNetGetProperties_v12_fn getProperties;
  ncclNetListen_v11_fn listen;
  ncclRmaConnect_v14_fn connect;
  ncclRmaCreateContext_v14_fn createContext;
  ncclRmaRegMrSym_v14_fn regMrSym;
  ncclRmaRegMrSymDmaBuf_v14_fn regMrSymDmaBuf;
  ncclRmaDeregMrSym_v14_fn deregMrSym;
  ncclRmaEnd_v14_fn destroyContext;
  ncclRmaEnd_v14_fn closeColl;
  ncclRmaEnd_v14_fn closeListen;
  ncclRmaPut_v14_fn iput;
  ncclRmaPutSignal_v14_fn iputSignal;
  ncclRmaPut_v14_fn iget;
  ncclRmaFlush_v14_fn iflush;
  ncclRmaTest_v14_fn test;
  ncclRmaEnd_v14_fn rmaProgress; /* may be NULL, as the next */
  ncclRmaQueryLastError_v14_fn queryLastError;
  ncclRmaEnd_v14_fn finalize;
} ncclRma_v14_t;

typedef struct {
  const char *name;
  ncclRmaInit_v14_fn init;
  ncclNetDevices_v4_fn devices;
  ncclNetGetProperties_v12_fn getProperties;
  ncclNetListen_v11_fn listen;
  ncclRmaConnect_v14_fn connect;
  ncclRmaCreateContext_v14_fn createContext;
  ncclRmaRegMrSym_v14_fn regMrSym;
  ncclRmaRegMrSymDmaBuf_v14_fn regMrSymDmaBuf;
  ncclRmaDeregMrSym_v14_fn deregMrSym;
  ncclRmaEnd_v14_fn destroyContext;
  ncclRmaEnd_v14_fn closeColl;
  ncclRmaEnd_v14_fn closeListen;
  ncclRmaPut_v15_fn iput;
  ncclRmaPutSignal_v15_fn iputSignal;
  ncclRmaPut_v15_fn iget;
  ncclRmaFlush_v14_fn iflush;
  ncclRmaTest_v14_fn test;
  ncclRmaEnd_v14_fn rmaProgress; /* may be NULL, as the next */
  ncclRmaQueryLastError_v14_fn queryLastError;
  ncclRmaEnd_v14_fn finalize;
} ncclRma_v15_t;

typedef struct {
  const char *name;
  ncclRmaInit_v14_fn init;
  ncclNetDevices_v4_fn devices;
  ncclRmaGetRmaProperties_v16_fn getRmaProperties; /* *props: one byte, whether a signal flushes all puts */
  ncclNetGetProperties_v12_fn getProperties;
  ncclNetListen_v11_fn listen;
  ncclRmaConnect_v14_fn connect;
  ncclRmaCreateContext_v14_fn createContext;
  ncclRmaRegMrSym_v14_fn regMrSym;
  ncclRmaRegMrSymDmaBuf_v14_fn regMrSymDmaBuf;
  ncclRmaDeregMrSym_v14_fn deregMrSym;
  ncclRmaEnd_v14_fn destroyContext;
  ncclRmaEnd_v14_fn closeColl;
  ncclRmaEnd_v14_fn closeListen;
  ncclRmaPut_v15_fn iput;
  ncclRmaPutSignal_v15_fn iputSignal;
  ncclRmaPut_v15_fn iget;
  ncclRmaFlush_v14_fn iflush;
  ncclRmaTest_v14_fn test;
  ncclRmaEnd_v14_fn rmaProgress; /* may be NULL, as the next */
  ncclRmaQueryLastError_v14_fn queryLastError;
  ncclRmaEnd_v14_fn finalize;
} ncclRma_v16_t;

#endif
