/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Settings by user space, data that it reads, and the reasons for which requests are lost. */
#pragma once

enum series_key {
	BY_DEVICE,
	BY_PROCESS,
	BY_THREAD,
	BY_CGROUP,
};

enum operation {
	READS,
	WRITES,
	FLUSHES,
	DISCARDS,
	DOES_OTHER,
	OPERATIONS,
};

enum series_limits {
	MAX_SERIES = 4096,
	/* For series by device and operation only. */
	MAX_DEVICE_SERIES = 512,
};

/* Requests that could not be counted, by reason. */
enum lost_reason {
	/* A completion without a start, mostly because the request was in progress when measurement started. */
	LOST_UNMATCHED,
	/* A request started at the address of one of which no completion was seen. */
	LOST_REUSED,
	/* No room for a request in progress. */
	LOST_REQUESTS_FULL,
	/* No room for a series. */
	LOST_SERIES_FULL,
	/* No room for a value in a histogram. */
	LOST_BUCKETS_FULL,
	/* No room for a late request: the reader is too slow. */
	LOST_LATE_EVENTS,
	/* A request of the measuring process, which is excluded. */
	LOST_OWN,
	/* A request without the arrival of its bio, so that its latency starts too late. */
	LOST_SUBMISSION,
	/* No room for a bio that limits hold back. */
	LOST_HELD_FULL,
	LOST_REASONS,
};

enum {
	COMM_LENGTH = 16,
};

/* The relevant request flags: their bits differ between kernels. */
enum request_flag {
	FLAG_PREFLUSH = 1 << 0,
	FLAG_FUA = 1 << 1,
	FLAG_AHEAD = 1 << 2,
	FLAG_SYNC = 1 << 3,
	FLAG_META = 1 << 4,
	FLAG_IDLE = 1 << 5,
	/* Not a flag of the kernel: the request was not issued to the device, except for the flush that it waited for. */
	FLAG_NOT_ISSUED = 1 << 6,
};

/* What signaled the completion of a request. */
enum signaled_by {
	SIGNALED_BY_NONE,
	SIGNALED_BY_INTERRUPT,
	SIGNALED_BY_SOFTIRQ,
};

/* Submitter and properties of a request. */
struct request_facts {
	u64 sector;
	/* Of the bio: the cgroup that dirtied the memory, not that of the writeback. 0: unknown. */
	u64 cgroup;
	u32 bytes;
	u32 device;
	/* In whylate's PID namespace; 0 if submitted in an interrupt. */
	u32 tid;
	u32 pid;
	u32 operation;
	/* enum request_flag */
	u32 flags;
	/* For series by process or thread: see identity_of(). */
	u32 identity;
	u32 unused;
	/* Function of the submitting work item, which identifies writeback; 0: not a work item. */
	u64 handler;
	char comm[COMM_LENGTH];
	/* For series by process: comm of the group leader. */
	char process[COMM_LENGTH];
};

/* A request in progress. */
struct block_request {
	/* Its address; 0: free, 1: being written. */
	u64 request;
	/* Its first bio arrived at the block layer, or at the limits before that. */
	u64 submitted_ns;
	/* Limits of a cgroup released it; 0: not held back. */
	u64 released_ns;
	u64 allocated_ns;
	/* When it was last issued to the device; 0: not yet. */
	u64 issued_ns;
	/* The block layer's own flush, on behalf of requests that asked for one. */
	u32 is_of_block_layer;
	/* It asked for a flush: the block layer clears the flag if it flushes by itself. */
	u32 has_flush;
	struct request_facts facts;
};

/* A completed request. */
struct done_request {
	struct block_request request;
	/* The completion interrupt started, or raised the softirq that completes it; completed_ns if there was none. */
	u64 signaled_ns;
	u64 completed_ns;
	/* A blk_status_t; 0: success. */
	s32 error;
	u32 cpu;
	/* enum signaled_by, of signaled_ns. */
	u32 signaled_by;
	u32 unused;
};

/* What is kept of a completed request, as a competitor of a late one. */
struct kept_request {
	/* Number of requests completed before on that CPU; inverted while the entry is being written. */
	u64 position;
	u64 request;
	u64 issued_ns;
	u64 signaled_ns;
	u64 completed_ns;
	u64 cgroup;
	u64 handler;
	u32 device;
	u32 tid;
	u32 pid;
	/* enum request_flag */
	u16 flags;
	u8 operation;
	u8 is_of_block_layer;
	char comm[COMM_LENGTH];
};

/* PID of the excluded process in whylate's PID namespace; 0: exclude none. */
const volatile u32 own_process = 0;
/* There are bio-based devices (device mapper, md, zram). */
const volatile bool has_bio_devices = false;
/* Count histograms of the phases of a latency. */
const volatile bool wants_phases = false;
/* Submitters are needed: for late requests, for competitors, or for series. */
const volatile bool wants_submitters = false;
/* on_block_getrq() is attached: before 6.5, requests with a flush have no other event at their start. */
const volatile bool starts_by_bio = false;
/* on_throttle_exit() is attached. */
const volatile bool sees_throttling = false;
const volatile enum series_key series_key = BY_DEVICE;
/* Number of elements of series_by_id in use; a test sets fewer. */
const volatile u32 series_limit = MAX_SERIES;
/* 0: no late requests. */
const volatile u64 late_over_ns = 0;
/* Keep completed requests, as competitors of late ones. */
const volatile bool keep_done = false;
/* Size of the ring of each CPU, a power of two. */
const volatile u32 done_by_cpu = 1;
/* 0: all. */
const volatile u32 wanted_device = 0;

/* Set by user space when everything is attached. */
bool enabled = false;

LOST_EVENTS(lost_reason, LOST_REASONS)
