/*
 * The tuner part of NCCL's plugin interface, stated in our own words.
 *
 * A tuner is asked, before each collective, to correct NCCL's estimate of how long each algorithm takes with each
 * protocol, and may say on how many channels it runs. From 2.21 on, NCCL looks for a tuner in the network plugin's
 * library when NCCL_TUNER_PLUGIN names none.
 *
 *   NCCL 2.20-2.21 loads v2, 2.22-2.23 v3, 2.24-2.27 v4, 2.28-2.29 v5, 2.30 and later v6.
 *
 * v1 (NCCL 2.19) is left out. It has no context, so an answer cannot depend on which communicator asks, and NCCL 2.19
 * looks for it only where NCCL_TUNER_PLUGIN names a file.
 */
#ifndef TOWLINE_NCCL_TUNER_H
#define TOWLINE_NCCL_TUNER_H

#include "nccl_net.h"

/* Collectives, as `collType` has them. */
enum {
  ncclFuncBroadcast = 0,
  ncclFuncReduce = 1,
  ncclFuncAllGather = 2,
  ncclFuncReduceScatter = 3,
  ncclFuncAllReduce = 4
};

/* The first index of the cost table, then the second. */
enum { NCCL_ALGO_TREE = 0, NCCL_ALGO_RING = 1, NCCL_ALGO_PAT = 6 /* from 2.23 */ };
enum { NCCL_PROTO_LL = 0, NCCL_PROTO_LL128 = 1, NCCL_PROTO_SIMPLE = 2 };

/* The table is one array of numAlgo rows of numProto times in microseconds, whatever its type says; negative where a
 * combination is not to be used. */
typedef ncclResult_t (*ncclTunerInit_v3_fn)(size_t nRanks, size_t nNodes, ncclDebugLogger_t logFunction,
                                            void **context);
typedef ncclResult_t (*ncclTunerInit_v5_fn)(void **context, uint64_t commId, size_t nRanks, size_t nNodes,
                                            ncclDebugLogger_t logFunction, void *nvlDomainInfo, void *constants);
/* v2 has no table: the tuner names the algorithm and the protocol, both or neither. What it leaves at -1, and a number of
 * channels that it leaves at 0, NCCL chooses. */
typedef ncclResult_t (*ncclTunerGetCollInfo_v2_fn)(void *context, int collType, size_t nBytes, int collNetSupport,
                                                   int nvlsSupport, int numPipeOps, int *algorithm, int *protocol,
                                                   int *nChannels);
typedef ncclResult_t (*ncclTunerGetCollInfo_v3_fn)(void *context, int collType, size_t nBytes, int numPipeOps,
                                                   float **collCostTable, int numAlgo, int numProto, int *nChannels);
typedef ncclResult_t (*ncclTunerGetCollInfo_v4_fn)(void *context, int collType, size_t nBytes, int numPipeOps,
                                                   float **collCostTable, int numAlgo, int numProto, int regBuff,
                                                   int *nChannels);
typedef ncclResult_t (*ncclTunerEnd_v3_fn)(void *context);
typedef ncclResult_t (*ncclTunerGetChunkSize_v6_fn)(void *context, int collType, size_t nBytes, int algo, int proto,
                                                    int nChannels, size_t *chunkSize);

typedef struct {
  const char *name;
  ncclTunerInit_v3_fn init; /* as in v3 */
  ncclTunerGetCollInfo_v2_fn getCollInfo;
  ncclTunerEnd_v3_fn destroy;
} ncclTuner_v2_t;

typedef struct {
  const char *name;
  ncclTunerInit_v3_fn init;
  ncclTunerGetCollInfo_v3_fn getCollInfo;
  ncclTunerEnd_v3_fn destroy;
} ncclTuner_v3_t;

typedef struct {
  const char *name;
  ncclTunerInit_v3_fn init;
  ncclTunerGetCollInfo_v4_fn getCollInfo;
  ncclTunerEnd_v3_fn destroy;
} ncclTuner_v4_t;

typedef struct {
  const char *name;
  ncclTunerInit_v5_fn init;
  ncclTunerGetCollInfo_v4_fn getCollInfo;
  ncclTunerEnd_v3_fn finalize;
} ncclTuner_v5_t;

typedef struct {
  const char *name;
  ncclTunerInit_v5_fn init;
  ncclTunerGetCollInfo_v4_fn getCollInfo;
  ncclTunerEnd_v3_fn finalize;
  ncclTunerGetChunkSize_v6_fn getChunkSize; /* may be NULL */
} ncclTuner_v6_t;

#endif
