/*
 * FlagCX's net adaptor plugin interface, version 1, stated in our own words. FlagCX 0.11 and later load it from the
 * library that FLAGCX_NET_ADAPTOR_PLUGIN names, as `flagcxNetAdaptorPlugin_v1`.
 *
 * Its result codes 0 to 7 are NCCL's, its device properties are those of NCCL's v8, and a NULL *sendComm, *recvComm or
 * *request means "not now, call again". The order of the functions is FlagCX's own; tests/abi/flagcx.rs checks it.
 */
#ifndef TOWLINE_FLAGCX_NET_H
#define TOWLINE_FLAGCX_NET_H

#include "nccl_net.h"

/* FlagCX says 128 bytes for a connection handle, but carries 64 to the peer, and the connecting side writes a pointer of
 * its own over the last 8 before the first connect. */

typedef ncclResult_t (*flagcxNetInit_v1_fn)(void);
typedef ncclResult_t (*flagcxNetRegMr_v1_fn)(void *comm, void *data, size_t size, int type, int mrFlags,
                                             void **mhandle);
typedef ncclResult_t (*flagcxNetRegMrDmaBuf_v1_fn)(void *comm, void *data, size_t size, int type, uint64_t offset,
                                                   int fd, int mrFlags, void **mhandle);
typedef ncclResult_t (*flagcxNetGetDevFromName_v1_fn)(char *name, int *dev);
/* The one-sided functions, which Towline does not have: their arguments are left out. */
typedef ncclResult_t (*flagcxNetOneSided_v1_fn)(void);

typedef struct {
  const char *name;
  flagcxNetInit_v1_fn init;
  ncclNetDevices_v4_fn devices;
  ncclNetGetProperties_v8_fn getProperties;
  ncclNetListen_v4_fn listen;
  ncclNetConnect_v4_fn connect; /* called again until it is connected, as in v5 */
  ncclNetAccept_v4_fn accept;   /* likewise */
  ncclNetClose_v4_fn closeSend;
  ncclNetClose_v4_fn closeRecv;
  ncclNetClose_v4_fn closeListen;
  flagcxNetRegMr_v1_fn regMr;
  flagcxNetRegMrDmaBuf_v1_fn regMrDmaBuf;
  ncclNetDeregMr_v4_fn deregMr;
  ncclNetIsend_v10_fn isend;
  ncclNetIrecv_v10_fn irecv; /* each size is an int in FlagCX's memory, read as a size_t: its upper half is padding */
  ncclNetIflush_v5_fn iflush;
  ncclNetTest_v4_fn test;
  flagcxNetOneSided_v1_fn iput;
  flagcxNetOneSided_v1_fn iget;
  flagcxNetOneSided_v1_fn iputSignal;
  flagcxNetGetDevFromName_v1_fn getDevFromName;
} flagcxNetAdaptor_v1_t;

#endif
