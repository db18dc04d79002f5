/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What user space sets, what it reads, and the reasons for which requests are lost. */
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
	/* Where series are of devices and operations alone. */
	MAX_DEVICE_SERIES = 512,
};

/* Requests that could not be counted, by reason. */
enum lost_reason {
	/* A request was done whose begin was not seen, mostly because it was in progress when measuring began. */
	LOST_UNMATCHED,
	/* A request began in the memory of one whose end was not seen. */
	LOST_REUSED,
	/* No room for a request in progress. */
	LOST_REQUESTS_FULL,
	/* No room for a series. */
	LOST_SERIES_FULL,
	/* No room for a value in a histogram. */
	LOST_BUCKETS_FULL,
	/* No room for a late request: the reader is too slow. */
	LOST_LATE_EVENTS,
	/* A request of the program that measures, which is left out. */
	LOST_OWN,
	/* A request whose bio was not seen coming, so that its latency begins later than it did. */
	LOST_SUBMISSION,
	/* No room for a bio that limits hold back. */
	LOST_HELD_FULL,
	LOST_REASONS,
};

enum {
	COMM_LENGTH = 16,
};

/* The kernel's flags that matter, whose numbers are not the same in each. */
enum request_flag {
	FLAG_PREFLUSH = 1 << 0,
	FLAG_FUA = 1 << 1,
	FLAG_AHEAD = 1 << 2,
	FLAG_SYNC = 1 << 3,
	FLAG_META = 1 << 4,
	FLAG_IDLE = 1 << 5,
	/* None of the kernel's: the device never had it, but for the flush that it waited for. */
	FLAG_NOT_ISSUED = 1 << 6,
};

/* What told that a request is done. */
enum told_by {
	TOLD_BY_NOBODY,
	TOLD_BY_INTERRUPT,
	TOLD_BY_SOFTIRQ,
};

/* Whose it is, and what. */
struct request_facts {
	u64 sector;
	/* Of the bio: where it was written to memory first, and not who writes it back. 0: unknown. */
	u64 cgroup;
	u32 bytes;
	u32 device;
	/* Numbers as they are shown; 0 where an interrupt submitted it. */
	u32 tid;
	u32 pid;
	u32 operation;
	/* enum request_flag */
	u32 flags;
	/* Where series are told apart by process or thread: see identity_of(). */
	u32 identity;
	u32 unused;
	/* The function of the work item that submitted it, which tells the flusher's writes; 0: it was none. */
	u64 handler;
	char comm[COMM_LENGTH];
	/* Where series are told apart by process: its name, which is that of its first thread. */
	char process[COMM_LENGTH];
};

/* A request from its begin on. */
struct block_request {
	/* Its address; 0 where there is none, 1 while it is being written. */
	u64 request;
	/* Its first bio came to the block layer, or to the limits before that. */
	u64 submitted_ns;
	/* Limits of a cgroup let it go; 0 where they did not hold it. */
	u64 let_go_ns;
	u64 made_ns;
	/* It was handed to the device, the last time; 0 before. */
	u64 issued_ns;
	/* The block layer's own flush, which those wait for that asked for one. */
	u32 is_of_block_layer;
	/* It asked for one: the block layer takes that off its flags where it flushes itself. */
	u32 has_flush;
	struct request_facts facts;
};

/* One that is done. */
struct done_request {
	/* How many were done on that CPU before, with all bits inverted while it is being written. */
	u64 position;
	struct block_request request;
	/* The interrupt that told of it began, or asked for the softirq that ends it; completed_ns where there was none. */
	u64 told_ns;
	u64 completed_ns;
	/* An error of the kernel, negative; 0: none. */
	s32 error;
	u32 cpu;
	/* enum told_by, of told_ns. */
	u32 told_by;
	u32 unused;
};

/* The process that measures, by its number as it is shown; 0: leave nothing out. */
const volatile u32 own_process = 0;
/* There are devices without requests, whose bios go to a driver as they are (device mapper, md, zram). */
const volatile bool has_bio_devices = false;
/* Histograms of what a latency is made of. */
const volatile bool wants_phases = false;
/* Who submits has to be known: for late requests, for what is kept, or for series. */
const volatile bool wants_submitters = false;
/* on_block_getrq() is attached: before 6.5, requests with a flush have no other event of their begin. */
const volatile bool begins_by_bio = false;
/* on_throttle_exit() is attached. */
const volatile bool tells_limits = false;
const volatile enum series_key series_key = BY_DEVICE;
/* Elements of series_by_id that are used; a test sets fewer. */
const volatile u32 series_limit = MAX_SERIES;
/* 0: no late requests. */
const volatile u64 late_over_ns = 0;
/* Keep those that are done, for what they made others wait. */
const volatile bool keep_done = false;
/* So many of each CPU, a power of two. */
const volatile u32 done_by_cpu = 1;
/* 0: all. */
const volatile u32 wanted_device = 0;

/* User space sets it when everything is attached. */
bool enabled = false;

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LOST_REASONS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, u64);
} lost_by_reason SEC(".maps");

static __always_inline void lose(enum lost_reason reason)
{
	u32 index = reason;
	u64 *count = bpf_map_lookup_elem(&lost_by_reason, &index);

	if (count)
		__sync_fetch_and_add(count, 1);
}
