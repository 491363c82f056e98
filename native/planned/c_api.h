/* The planned allocator for CUDA memory: a C interface without PyTorch and without CUDA at build time.
 *
 * `memplan_malloc` and `memplan_free` are what torch.cuda.memory.CUDAPluggableAllocator loads. Until a
 * plan is loaded they behave like PyTorch's own caching allocator; with one, a request that the plan
 * foresees gets its planned place in an arena, and all others go on as before. Every function may be
 * called from any thread. Bytes throughout; intervals are half-open.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MEMPLAN_ABI 1

typedef void* memplan_stream; /* cudaStream_t */

/* ---- Requests -------------------------------------------------------------------------------- */

/* NULL for 0 bytes, and where memory is out after all that could be given back was. */
void* memplan_malloc(ssize_t bytes, int device, memplan_stream stream);
void memplan_free(void* pointer, ssize_t bytes, int device, memplan_stream stream);
/* The plan's place or NULL, never the caching allocator's: for a front end with an allocator of its
 * own. A NULL counts as a miss. */
void* memplan_malloc_planned(ssize_t bytes, int device, memplan_stream stream);
/* `stream` uses the block as well: after its release it is reused only when that work is done. */
void memplan_record_stream(void* pointer, memplan_stream stream);
/* 1 for an address in a device's arena. */
int memplan_owns(const void* pointer);
/* Gives back to the device what nothing uses: cached blocks, pages of the arena. */
void memplan_empty_cache(int device);

/* The same as PyTorch calls them: it does not look for NULL, but turns the std::runtime_error that is
 * thrown instead into one of Python; and it empties caches of all devices at once. */
void* memplan_torch_malloc(ssize_t bytes, int device, memplan_stream stream);
void memplan_torch_empty_cache(void);

/* ---- Plans ----------------------------------------------------------------------------------- */

/* The allocation part of a plan (types/allocation.py), by column; copied. */
typedef struct {
  int64_t abi; /* MEMPLAN_ABI */
  int64_t requests;
  int64_t setup; /* of the requests, those before the first round */
  int64_t start;    /* moments before the first round */
  int64_t clock;    /* moments of a round */
  int64_t arena_bytes;
  int64_t phases; /* how many */
  const int64_t* bytes;
  const int64_t* stream;
  const int64_t* phase; /* -1 in the setup */
  const int64_t* lower;
  const int64_t* upper;
  const int64_t* offset; /* -1: not planned */
  const int64_t* space;  /* -1, or the number of the space of a dynamic request */
  int64_t spaces;
  const int64_t* space_lower;  /* by space: its window */
  const int64_t* space_upper;
  const int64_t* space_ranges; /* spaces + 1: where each one's begin in `ranges`, in pairs */
  const int64_t* ranges;       /* lower, upper; lower, upper; ... */
} memplan_plan;

/* Takes effect at once: what is allocated stays where it is, what is cached goes back to the device.
 * A plan that is there is replaced. With `in_round` the job is already past its setup: the next
 * request is looked for in the round.
 * 0, or -1 with the reason in `why` (cut to `room` bytes). */
int memplan_load(int device, const memplan_plan* plan, int in_round, char* why, size_t room);
/* New requests go to the caching allocator; places in use stay valid until they are freed, and pages
 * that nothing uses go back to the device. */
void memplan_unload(int device);
/* The job enters a phase: its number in the plan's `phases`; -1 for one that the plan does not know
 * (set-up, evaluation), whose requests are not looked for in the plan. */
void memplan_enter_phase(int device, int32_t phase);

/* ---- What it did ----------------------------------------------------------------------------- */

typedef struct {
  int64_t allocated, allocated_peak;   /* bytes of blocks in use, rounded as PyTorch rounds */
  int64_t requested, requested_peak;   /* the same as asked for */
  int64_t reserved, reserved_peak;     /* taken from the device: cached segments and mapped pages */
  int64_t arena_mapped, arena_peak;    /* of it, pages of the arena */
  int64_t upstream_reserved;           /* of it, segments of the caching allocator */
  int64_t mallocs, frees;              /* calls since the beginning */
  int64_t hits;       /* requests at their planned place */
  int64_t dynamic;    /* requests in the reusable space of their window */
  int64_t adopted;    /* unforeseen requests in free space of the arena */
  int64_t misses;     /* requests left to the caching allocator while a plan was loaded */
  int64_t fallback_bytes, fallback_peak; /* in use by misses */
  int64_t resyncs;    /* times that the place in the plan was lost and found again */
  int64_t retries;    /* times that memory was out and something was given back */
  int64_t ooms;       /* requests that failed */
  int64_t waits;      /* waits of one stream for another at a change of hands */
} memplan_statistics;

/* 0, or -1 for a device that has made no request. */
int memplan_read_statistics(int device, memplan_statistics* statistics);
void memplan_reset_peaks(int device);

/* A front end with an allocator of its own took so many bytes or, negative, gave them back: they count
 * in `allocated`, `requested`, `reserved` and their peaks. */
void memplan_count(int device, int64_t allocated, int64_t requested, int64_t reserved);

typedef struct {
  int64_t address, bytes; /* of the block; a segment's first block begins where the segment does */
  int64_t requested;      /* 0 where it is free */
  int64_t segment;        /* number of its segment, from 0 */
  memplan_stream stream;
  int32_t planned;        /* whether the segment is the arena */
  int32_t state;          /* 0 free, 1 in use, 2 freed and awaited by another stream */
} memplan_block;

/* Blocks of a device by address within segments: how many there are; at most `room` are written. */
int64_t memplan_snapshot(int device, memplan_block* blocks, int64_t room);

/* ---- Recording ------------------------------------------------------------------------------- */

enum {
  MEMPLAN_EVENT_ALLOC = 0,        /* numbers as in memplan.types.trace.EventKind */
  MEMPLAN_EVENT_FREE = 1,
  MEMPLAN_EVENT_RECORD_STREAM = 3,
  MEMPLAN_EVENT_EMPTY_CACHE = 7,
  MEMPLAN_EVENT_OUT_OF_MEMORY = 13,
  MEMPLAN_EVENT_PHASE = 100       /* bytes: the number given to memplan_mark */
};

typedef struct {
  int64_t bytes;   /* as asked for */
  int64_t storage; /* number of the request that the event belongs to; -1 for none */
  int64_t stream;  /* number of the stream, in the order of first use; 0 is the default stream */
  int64_t nanoseconds; /* on the steady clock */
  int32_t kind;
  int32_t thread;  /* number of the thread, in the order of first use */
} memplan_event;

/* Keeps events of a device from now on, at most `most`; what is alive is recorded as requested now. */
void memplan_record(int device, int64_t most);
void memplan_stop_recording(int device);
/* Takes up to `room` of the events kept; how many. Events lost to `most` are counted in `lost`. */
int64_t memplan_take_events(int device, memplan_event* events, int64_t room, int64_t* lost);
/* A front end with an allocator of its own served a request, or it was released: recorded as one of
 * the library's. What it counts for goes to `memplan_count`. */
void memplan_note_malloc(int device, const void* pointer, int64_t bytes, memplan_stream stream);
void memplan_note_free(int device, const void* pointer);
/* Puts a MEMPLAN_EVENT_PHASE among the events. */
void memplan_mark(int device, int64_t number);
/* The same with the number of a stream; -1 for one that no request or recorded use has named. */
void memplan_mark_stream(int device, int64_t number, memplan_stream stream);

/* ---- Limits and tests ------------------------------------------------------------------------ */

/* No more than so many bytes are taken from the device; -1 for what it has. */
void memplan_set_limit(int device, int64_t bytes);
/* From now on the n-th allocation of device memory fails (n = 1: the next), once; 0 for none. */
void memplan_fail_at(int device, int64_t n);
/* The library of the CUDA driver to load instead of libcuda.so.1; before the first request. */
void memplan_use_driver(const char* path);

#ifdef __cplusplus
}
#endif
