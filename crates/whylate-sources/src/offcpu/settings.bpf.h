/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Settings by user space, data that it reads, and the reasons for which samples are lost. */
#pragma once

/* State of a thread, as in ps(1), with the runnable states distinguished. */
enum thread_state {
	STATE_ON_CPU,
	/* Runnable without a CPU. */
	STATE_READY,
	/* Runnable, and its cgroup has used up its CPU quota. */
	STATE_THROTTLED,
	STATE_SLEEPING,
	STATE_UNINTERRUPTIBLE,
	/* A kernel thread without work. */
	STATE_IDLE,
	STATE_STOPPED,
	STATE_TRACED,
	STATE_PARKED,
	/* With its cgroup, or the whole system. */
	STATE_FROZEN,
	STATE_OTHER,
	/* No wait: a place at which a thread woke another one. */
	STATE_WAKES,
};

/* What ended a wait. */
enum waker {
	WAKER_UNSEEN,
	/* A hard interrupt or softirq. */
	WAKER_INTERRUPT,
	/* Plus the index of the place of a thread in STATE_WAKES. */
	WAKER_THREADS,
};

/* Samples that could not be counted, by reason. */
enum lost_reason {
	/* The thread ran while its stack was read: its time is counted, without a stack. */
	LOST_TORN,
	/* No memory for a thread's record. */
	LOST_THREADS,
	/* No room for a process. */
	LOST_PROCESSES,
	/* No room for a stack. */
	LOST_STACKS,
	/* No room for a place. */
	LOST_PLACES,
	/* No room for the unwind rule of a frame: the stack is marked as unwound partly. */
	LOST_RULES,
	/* A wait of which the switch-out was not seen, if switches are traced: its time is left out. */
	LOST_UNSEEN,
	/* The wakeup was not seen: the time is counted, and marked as such. */
	LOST_WAKERS,
	/* Reading the thread's memory might block, on its mmap lock or a file system: its time is counted all the same. */
	LOST_UNREAD,
	/* No room for a waiter or its holder: the holder is not reported. */
	LOST_HOLDERS,
	LOST_REASONS,
};

enum offcpu_limits {
	MAX_FRAMES = 127,
	/* Range of slots; user space allocates them by the number of threads. */
	MIN_RECORDS = 8192,
	MAX_RECORDS = 1048576,
	STACKS = 32768,
	/* At most; a function that finds no room for a place returns this. */
	PLACES = 131072,
	/* With few threads, and with very few. */
	FEW_PLACES = 65536,
	FEWEST_PLACES = 32768,
	PROCESSES = 65536,
	RULES = 131072,
	/* With very few threads. */
	FEWEST_RULES = 65536,
	RULE_PROBES = 8,
	UNKNOWN_FRAMES = 8192,
	/* Bytes copied at a time from a user stack, within a page. */
	WINDOW_BYTES = 1024,
	PAGE_BYTES = 4096,
	VISITS_PER_CLOCK_READ = 16,
	OWN_CODE = 6,
	/* Frames of the program that captures a stack and of its callers; they are left out. */
	OWN_FRAMES = 15,
	REPLACED_RETURNS = 3,
};

/* How the unwinding of a user stack ended. */
enum user_end {
	/* At the outermost function of the thread. */
	USER_COMPLETE,
	/* The next frame is not known, or the stack has more frames than are kept. */
	USER_PARTLY,
	/* The thread ran while its stack was read. */
	USER_TORN,
	/* A 32-bit program, or another architecture: its frames are not read. */
	USER_UNREADABLE,
	/* User space has to find the unwind rule of a frame. */
	USER_UNKNOWN,
	/* The stack is cached: it is not unwound again. */
	USER_SEEN,
	/* Reading its memory might block. */
	USER_UNREAD,
};

/* What could not be read for a thread's stack. */
enum unread {
	UNREAD_NOTHING,
	/* Its memory might have blocked: the next walk takes the stack again. */
	UNREAD_MEMORY,
	/* Code: the next walk in which user space retries to read code takes the stack again. */
	UNREAD_CODE,
};

/* How to unwind from a frame to its caller. */
enum rule_base {
	RULE_NONE,
	/* Requested from user space. */
	RULE_ASKED,
	/* Being written: switches of several CPUs may request the same rule, while user space answers. */
	RULE_CLAIMED,
	/* The canonical frame address is the stack pointer, or the frame pointer, plus an offset. */
	RULE_SP,
	RULE_BP,
	/* In memory at the frame pointer (which points to the caller's) plus offset: the function realigns its stack. */
	RULE_AT_BP,
	/* No unwind information for this code: assume a chain of frame pointers. */
	RULE_CHAIN,
	/* The outermost function of a thread. */
	RULE_ROOT,
	/* The unwind information is of an unsupported kind. */
	RULE_BROKEN,
	/* The code could not be read: user space has the rule requested again later. */
	RULE_FAILED,
};

enum {
	/* As `bp_offset`: the caller's frame pointer is still in its register. */
	BP_KEPT = 0x7fffffff,
};

/* A rule is of one address in one process. An innermost frame has its own, as its address is no return address. */
struct unwind_rule {
	u64 ip;
	u32 process;
	u32 base;
	s32 cfa_offset;
	/* Position of the caller's frame pointer relative to the canonical frame address. */
	s32 bp_offset;
};

/* A frame without a rule, and its thread. */
struct unknown_frame {
	u64 ip;
	u64 sp;
	u64 bp;
	u32 process;
	/* As in whylate's PID namespace, and so in /proc. */
	u32 tgid;
	u32 tid;
	u32 innermost;
	/* Written last: one more than the round of the question. */
	u32 asked_in;
	u32 unused;
};

/* Distinguishes a process from later ones with its PID, and from itself before exec. */
struct process_key {
	u64 started_ns;
	u32 tgid;
	u32 execs;
};

struct process_value {
	u32 id;
	/* As in whylate's PID namespace. */
	u32 tgid;
	char comm[16];
};

/* Two independent 64-bit hashes over all frames and, for user stacks, the process. */
struct stack_key {
	u64 hash[2];
};

struct stack_value {
	u32 id;
	u32 length;
	u64 frames[MAX_FRAMES];
};

/* A place: the aggregation key of time. */
struct place_key {
	u64 cgroup;
	u32 process;
	/* As in whylate's PID namespace; 0 unless threads are kept apart. */
	u32 tid;
	/* Stack IDs; 0: none. */
	u32 kernel_stack;
	u32 user_stack;
	/* -1: none. */
	s32 syscall;
	u8 state;
	u8 in_iowait;
	u8 user_end;
	u8 is_kernel;
	char comm[16];
};

/* A wait by place and waker. */
struct wait_key {
	u32 place;
	/* enum waker */
	u32 waker;
};

/* Written only by the sampling thread; if switches are traced, by each CPU too. */
struct place_sum {
	u64 ns;
	u64 samples;
	/* Number of distinct waits that the samples are of. */
	u64 waits;
	/* If switches are traced: one more than the place of the run-queue wait that follows this wait. */
	u32 ready_place;
	u32 unused;
};

/* State of a thread between visits: one cache line. */
struct thread_record {
	union {
		/* Start time of the thread, which distinguishes it from others of its slot; 0: the slot is free. */
		u64 started_ns;
		/* If switches are traced (without slots): the last waker, and one more than the generation of its place. */
		struct {
			u32 waker;
			u32 waker_generation;
		};
	};
	/* Voluntary and involuntary switches at the last visit: while the count is the same, the thread has not run. */
	u64 switches;
	/* Up to when its time is counted. */
	u64 counted_ns;
	/* Start of the current state, on CLOCK_MONOTONIC. */
	u64 since_ns;
	u32 place;
	u32 process;
	u32 execs;
	/* One more than the generation of the tables that have its place; 0: no place. */
	u32 generation;
	u8 state;
	u8 is_unresolved;
	u8 is_skipped;
	u8 is_known;
	union {
		/* If switches are traced: one more than the place of its on-CPU time, and its generation below. */
		u32 on_cpu_place;
		/* Otherwise the lower half of its address: a thread that calls exec takes over PID and start time of the leader. */
		u32 half_address;
	};
	u32 on_cpu_generation;
	/* Created since switches are traced, and not yet switched in. */
	u8 is_new;
	/* Its current state is already counted as lost. */
	u8 is_lost;
	/* enum unread: a later walk takes the stack again. */
	u8 unread;
	u8 unused;
};

/* Since when a thread is in its state, at the end of a snapshot interval. */
struct thread_now {
	u64 since_ns;
	u32 place;
	u32 tid;
	u32 tgid;
	u32 state;
	/* The number under which it is shown. */
	u32 shown;
	/* The lower half of its voluntary and involuntary switches: while the count is the same, it has not run. */
	u32 switches;
};

/* In the first PID namespace. */
const volatile s32 own_tgid = 0;
/* Unwind by frame pointers, also code that has unwind rules. */
const volatile bool by_frame_pointers = false;
/* In the first PID namespace; 0: all. */
const volatile s32 wanted_tgid = 0;
/* A bit for each state. */
const volatile u32 wanted_states = ~0u;
const volatile bool read_user_stacks = true;
const volatile bool by_thread = false;
const volatile u32 max_depth = MAX_FRAMES;
/* One less than the number of record slots. */
const volatile u32 records_mask = MIN_RECORDS - 1;
/* Length of the tables of places; user space reduces it if there are few threads. */
const volatile u32 most_places = PLACES;
/* Trace each switch, instead of sampling only. */
const volatile bool traces = false;
/* Record the waker of each wait. */
const volatile bool records_wakers = false;
/* Kernel functions on a stack only because a program captures it there. */
const volatile u64 own_code_begin[OWN_CODE] = {};
const volatile u64 own_code_end[OWN_CODE] = {};
/* Trampolines that replace return addresses of traced functions: the stack itself does not show their callers. */
const volatile u64 replaced_return_begin[REPLACED_RETURNS] = {};
const volatile u64 replaced_return_end[REPLACED_RETURNS] = {};
/* do_syscall_64(). */
const volatile u64 system_call_begin = 0;
const volatile u64 system_call_end = 0;

/* Rounds of a walk over the threads: after the first one, user space has added missing unwind rules. */
u32 walk_round = 0;
/* Switches are counted while this is set. */
bool is_tracing = false;
bool is_last_round = false;
/* Incremented when the tables are emptied. */
u32 generation = 0;
u64 began_ns = 0;
/* Start of the walk before this one: a slot without time counted since is of an exited thread. */
u64 last_walk_ns = 0;
u32 unresolved = 0;
/* Of the unresolved threads, those with unresponsive memory; the last unresponsive process, and one more than its round. */
u32 unanswered = 0;
s32 unresponsive_tgid = 0;
u32 unresponsive_round = 0;
/* Number of questions in this round (lower half), and the number of the round, which user space starts. */
u64 questions = 0;
/* Counters from which IDs and indexes are assigned. */
u32 processes = 0;
u32 stacks = 0;
u32 places = 0;
/* Threads visited in the last walk, and those of them with captured stacks. */
u64 threads_visited = 0;
u64 threads_changed = 0;
/* When this walk last read the clock. */
u64 walk_now_ns = 0;
/* Offset from the clock of the run queues to CLOCK_MONOTONIC. */
u64 clock_offset_ns = 0;
bool has_clock_offset = false;
/* When this walk was due, on the sampler's run queue clock; the sampler's run_delay at the end of the last walk. */
u64 walk_due_clock_ns = 0;
u64 sampler_waited_ns = 0;
/* Cleared by user space at the start of a walk. */
bool is_calibrated = false;
/* In this walk user space retries to read code that it could not read. */
bool retries_code = false;
/*
 * enum unread of the stack that was last captured. Not on the program's stack, where the verifier would track each value.
 * If switches are traced, it may be that of another thread: then a later walk takes the stack again in vain.
 */
volatile u32 unread_now = 0;

LOST_EVENTS_IN_MAP(lost_reason, LOST_REASONS)

/* Length of rule_by_slot, a power of two. */
const volatile u32 rule_slots = RULES;

/*
 * Indexed by the lower bits of the TID. Walks visit threads in TID order, so the next record is in the cache already;
 * task storage is in three cache lines that are not, and takes longer than all the rest.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MIN_RECORDS);
	__type(key, u32);
	__type(value, struct thread_record);
} record_by_slot SEC(".maps");

/* Of threads that share a slot with another; of all threads if switches are traced, which come in no order. */
struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct thread_record);
} record_by_thread SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, PROCESSES);
	__type(key, struct process_key);
	__type(value, struct process_value);
} process_by_key SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, STACKS);
	__type(key, struct stack_key);
	__type(value, struct stack_value);
} stack_by_hash SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, PLACES);
	__type(key, struct place_key);
	__type(value, u32);
} place_by_key SEC(".maps");

/* The place of a wait with a known waker. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, PLACES);
	__type(key, struct wait_key);
	__type(value, u32);
} place_by_wait SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, PLACES);
	__type(key, u32);
	__type(value, struct place_sum);
} sum_by_place SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, RULES);
	__type(key, u32);
	__type(value, struct unwind_rule);
} rule_by_slot SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, UNKNOWN_FRAMES);
	__type(key, u32);
	__type(value, struct unknown_frame);
} unknown_frames SEC(".maps");

struct scratch {
	u64 window[WINDOW_BYTES / 8];
	struct stack_value kernel;
	/* Continues `kernel`, for stacks that begin with own frames. */
	u64 behind_kernel[OWN_FRAMES];
	struct stack_value user;
	/* The thread in whylate's PID namespace; not set in the first PID namespace. */
	u32 tgid;
	u32 tid;
	/* State of the thread that is switched out; volatile: the verifier does not track values read from memory. */
	volatile u32 state;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct scratch);
} scratch_of_sampler SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct scratch);
} scratch_of_cpu SEC(".maps");
