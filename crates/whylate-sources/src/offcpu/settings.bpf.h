/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What user space sets, what it reads, and the reasons for which samples are lost. */
#pragma once

/* What a thread does, as ps(1) tells it, with the runnable ones told apart. */
enum thread_state {
	STATE_ON_CPU,
	/* Runnable, and another thread has the CPU. */
	STATE_READY,
	/* Runnable, and its cgroup has used its share up. */
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
	/* Of no thread that waits: whose place it is has woken one. */
	STATE_WAKES,
};

/* Who has ended a wait. */
enum waker {
	WAKER_UNSEEN,
	/* An interrupt, or a softirq. */
	WAKER_INTERRUPT,
	/* And the number of the place of a thread in STATE_WAKES. */
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
	/* No room for the rule by which a frame is unwound: the stack is marked as unwound partly. */
	LOST_RULES,
	/* A wait that was not seen to begin, where switches are traced: its time is left out. */
	LOST_UNSEEN,
	/* Who ended a wait was not seen: its time is counted, and says so. */
	LOST_WAKERS,
	/* Reading a thread's memory might wait, for whoever holds it or for a file system: its time counts all the same. */
	LOST_UNREAD,
	/* No room for a thread that waits for another, or for that one: whom it waits for is not told. */
	LOST_HOLDERS,
	LOST_REASONS,
};

enum offcpu_limits {
	MAX_FRAMES = 127,
	/* User space makes as many as the threads need. */
	LEAST_RECORDS = 16384,
	MOST_RECORDS = 1048576,
	STACKS = 32768,
	PLACES = 131072,
	PROCESSES = 65536,
	RULES = 131072,
	RULE_PROBES = 8,
	UNKNOWN_FRAMES = 8192,
	/* Of a user stack so much is copied at a time, within a page. */
	WINDOW_BYTES = 1024,
	PAGE_BYTES = 4096,
	LOOKS_PER_CLOCK_READ = 16,
	OWN_CODE = 6,
	/* Frames of the program that takes a stack and of what calls it; they are left out. */
	OWN_FRAMES = 15,
	REPLACED_RETURNS = 3,
};

/* What is known of a thread's user stack. */
enum user_end {
	/* To the function that began the thread. */
	USER_COMPLETE,
	/* The next frame could not be told, or there are more of them than are wanted. */
	USER_PARTLY,
	/* The thread ran meanwhile. */
	USER_TORN,
	/* A 32-bit program, or another architecture: its frames are not read. */
	USER_UNREADABLE,
	/* User space has to say how to unwind a frame. */
	USER_UNKNOWN,
	/* To the same function as a stack that is known: it is not unwound again. */
	USER_SEEN,
	/* Reading its memory might wait. */
	USER_UNREAD,
};

/* What of a thread's stack could not be read. */
enum unread {
	UNREAD_NOTHING,
	/* Its memory might have waited: the next walk takes the stack again. */
	UNREAD_MEMORY,
	/* Code: the next walk does that for which user space tries to read it again. */
	UNREAD_CODE,
};

/* How to get from a frame to its caller. */
enum rule_base {
	RULE_NONE,
	/* User space has been asked. */
	RULE_ASKED,
	/* Somebody is writing it: switches of several CPUs ask at the same time, and user space answers meanwhile. */
	RULE_CLAIMED,
	/* The canonical frame address is the stack pointer, or the frame pointer, plus an offset. */
	RULE_SP,
	RULE_BP,
	/* In memory at the frame pointer (which points to the caller's) plus offset: a function aligns its stack. */
	RULE_AT_BP,
	/* Nothing is known of this code: it is taken to keep a chain of frame pointers. */
	RULE_CHAIN,
	/* The first function of a thread. */
	RULE_ROOT,
	/* The code says how, in a way that is not understood here. */
	RULE_BROKEN,
	/* The code could not be read: user space asks for the rule again later. */
	RULE_FAILED,
};

enum {
	/* As `bp_offset`: the caller's frame pointer is still in its register. */
	BP_KEPT = 0x7fffffff,
};

/* A rule is for one address in one process, and apart for an innermost frame, whose address is no return address. */
struct unwind_rule {
	u64 ip;
	u32 process;
	u32 base;
	s32 cfa_offset;
	/* Where the caller's frame pointer is, from the canonical frame address. */
	s32 bp_offset;
};

/* A frame for which there is no rule, and whose it is. */
struct unknown_frame {
	u64 ip;
	u64 sp;
	u64 bp;
	u32 process;
	/* As they are shown, which is how they are called in /proc. */
	u32 tgid;
	u32 tid;
	u32 innermost;
	/* Written last: one more than the round in which it was asked. */
	u32 asked_in;
	u32 unused;
};

/* A process is told from later ones of the same number, and from what it was before it called exec. */
struct process_key {
	u64 started_ns;
	u32 tgid;
	u32 execs;
};

struct process_value {
	u32 id;
	/* As it is shown. */
	u32 tgid;
	char comm[16];
};

/* Two independent 64-bit hashes over all frames and, of user stacks, the process. */
struct stack_key {
	u64 hash[2];
};

struct stack_value {
	u32 id;
	u32 length;
	u64 frames[MAX_FRAMES];
};

/* Where time is spent: everything that the time is told apart by. */
struct place_key {
	u64 cgroup;
	u32 process;
	/* As it is shown; 0 unless threads are told apart. */
	u32 tid;
	/* 0: none. */
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

/* A wait by where it was and who ended it. */
struct wait_key {
	u32 place;
	/* enum waker */
	u32 waker;
};

/* Only the thread that samples writes these; where switches are traced, each CPU adds to them. */
struct place_sum {
	u64 ns;
	u64 samples;
	/* How many waits of their own the samples are of. */
	u64 waits;
	/* Where switches are traced: one more than the place of the same wait once the thread could run again. */
	u32 ready_place;
	u32 unused;
};

/* What is remembered of a thread: a line of memory. */
struct thread_record {
	union {
		/* When the thread was born, which tells it from others of its slot; 0: the slot is free. */
		u64 started_ns;
		/* Where switches are traced (without slots): who has woken it, and one more than those tables' generation. */
		struct {
			u32 waker;
			u32 waker_generation;
		};
	};
	/* Voluntary and involuntary switches at the last sight: as long as they stay the same, the thread has not run. */
	u64 switches;
	/* Up to when its time is counted. */
	u64 counted_ns;
	/* Since when it does what it does now, on CLOCK_MONOTONIC. */
	u64 since_ns;
	u32 place;
	u32 process;
	u32 execs;
	/* One more than that of the tables in which its place is; 0: it has none. */
	u32 generation;
	u8 state;
	u8 is_unresolved;
	u8 is_skipped;
	u8 is_known;
	union {
		/* Where switches are traced: one more than the place of its time on CPUs, and of which tables that is. */
		u32 on_cpu_place;
		/* Elsewhere the lower half of its address: by exec a thread takes over its first one's number and birth. */
		u32 half_address;
	};
	u32 on_cpu_generation;
	/* Born since switches are traced, and has had no CPU yet. */
	u8 is_new;
	/* What it does now is counted as lost already. */
	u8 is_lost;
	/* enum unread: the stack is taken again by a later walk. */
	u8 unread;
	u8 unused;
};

/* A thread at the end of a span, for whoever asks how long it has waited. */
struct thread_now {
	u64 since_ns;
	u32 place;
	u32 tid;
	u32 tgid;
	u32 state;
	/* The number under which it is shown. */
	u32 shown;
	u32 padding;
};

/* By the kernel's number. */
const volatile s32 own_tgid = 0;
/* Callers are told by frame pointers, also of code that has unwind rules. */
const volatile bool by_frame_pointers = false;
/* By the kernel's number; 0: all. */
const volatile s32 wanted_tgid = 0;
/* A bit for each state. */
const volatile u32 wanted_states = ~0u;
const volatile bool read_user_stacks = true;
const volatile bool tell_threads_apart = false;
const volatile u32 max_depth = MAX_FRAMES;
/* One less than there are slots for records. */
const volatile u32 records_mask = LEAST_RECORDS - 1;
/* Each switch is counted, and not only what is found. */
const volatile bool traces = false;
/* And who has ended each wait. */
const volatile bool tells_wakers = false;
/* Code of the kernel that stands in a stack only because a program takes it there. */
const volatile u64 own_code_begin[OWN_CODE] = {};
const volatile u64 own_code_end[OWN_CODE] = {};
/* Where functions return to whose return is traced; the stack itself does not tell their callers then. */
const volatile u64 replaced_return_begin[REPLACED_RETURNS] = {};
const volatile u64 replaced_return_end[REPLACED_RETURNS] = {};
/* do_syscall_64(). */
const volatile u64 system_call_begin = 0;
const volatile u64 system_call_end = 0;

/* Each walk over the threads has rounds: after the first one, user space says how to unwind what was not known. */
u32 walk_round = 0;
/* From then on switches are counted. */
bool is_tracing = false;
bool is_last_round = false;
/* Changes when the tables have been emptied. */
u32 generation = 0;
u64 began_ns = 0;
/* When the walk before this one began: a slot that nobody has counted in since is of a thread that has ended. */
u64 last_walk_ns = 0;
u32 unresolved = 0;
/* Of these, threads whose memory did not answer; and the last process of which that was met, and one more than when. */
u32 unanswered = 0;
s32 silent_tgid = 0;
u32 silent_round = 0;
/* How many frames this round has asked for (lower half), and the number of the round, which user space begins. */
u64 questions = 0;
/* How many there are; each gets the next number. */
u32 processes = 0;
u32 stacks = 0;
u32 places = 0;
/* Threads that the last walk has met, and those of them whose stack was looked at. */
u64 threads_met = 0;
u64 threads_changed = 0;
/* When the clock was read last in this walk. */
u64 walk_now_ns = 0;
/* From the clock of the run queues to CLOCK_MONOTONIC. */
u64 clock_offset_ns = 0;
bool has_clock_offset = false;
/* When this walk was due, on the sampler's run queue clock; the sampler's waits for CPUs up to the last walk's end. */
u64 look_clock_ns = 0;
u64 sampler_waited_ns = 0;
/* User space takes it back when it begins a walk. */
bool is_calibrated = false;
/* In this walk user space tries again to read code that it could not read. */
bool retries_code = false;
/*
 * enum unread of the stack that the walk has taken last. Not on the stack, where the verifier would follow each value.
 * Where switches are traced, one of another thread may be taken for it: then a later walk takes the stack again in vain.
 */
volatile u32 unread_now = 0;

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LOST_REASONS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, u64);
} lost_by_reason SEC(".maps");

/*
 * By the thread's number without its upper bits. Walks meet threads in that order, so the next record is in the cache
 * already; a thread's own storage is in three lines of memory that are not, and takes longer than all the rest.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LEAST_RECORDS);
	__type(key, u32);
	__type(value, struct thread_record);
} record_by_slot SEC(".maps");

/* Of threads whose slot is another's; of all where switches, which meet threads in no order, are traced. */
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

/* The place at which a wait is counted, once it is known who has ended it. */
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
	/* Stacks that begin with own frames go on here. */
	u64 behind_kernel[OWN_FRAMES];
	struct stack_value user;
	/* Whose it is, as they are shown; not written in the first PID namespace. */
	u32 tgid;
	u32 tid;
	/* Of the thread that gives up its CPU: what comes out of memory the verifier does not follow. */
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

static __always_inline void lose(enum lost_reason reason)
{
	u32 index = reason;
	u64 *count = bpf_map_lookup_elem(&lost_by_reason, &index);

	if (count)
		__sync_fetch_and_add(count, 1);
}
