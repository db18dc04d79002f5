// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * A walk over all threads. For a thread that has not run since the last walk, it reads the switch count and adds time to
 * the thread's place. Only one thread of user space walks at a time; if switches are traced (trace.bpf.h), each CPU
 * looks up and adds as well.
 */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>
#include "compat.bpf.h"
#include "lost.bpf.h"
#include "ways.bpf.h"
#include "registers.bpf.h"
#include "pid_namespace.bpf.h"
#include "settings.bpf.h"
#include "stopped.bpf.h"
#include "wanted_threads.bpf.h"
#include "seen_stacks.bpf.h"
#include "unwind.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Always empty: puts the types that user space shares into the skeleton. */
struct {
	struct thread_now thread_now;
	struct unwind_rule unwind_rule;
	struct unknown_frame unknown_frame;
	struct process_value process_value;
	struct stack_value stack_value;
	struct place_key place_key;
	struct place_sum place_sum;
	enum thread_state thread_state;
	enum lost_reason lost_reason;
	struct wait_key wait_key;
	enum waker waker;
	enum offcpu_limits offcpu_limits;
	enum user_end user_end;
	enum rule_base rule_base;
} layouts = {};

/* Bits of task_struct.__state (include/linux/sched.h). */
enum {
	TASK_UNINTERRUPTIBLE = 0x2,
	TASK_PARKED = 0x40,
	TASK_NOLOAD = 0x400,
	TASK_RTLOCK_WAIT = 0x1000,
};

/* Bits of task_struct.flags: threads of user processes without user frames, and kernel threads. */
enum {
	PF_USER_WORKER = 0x4000,
	PF_KTHREAD = 0x200000,
};

/* Hides the state from the verifier, which would verify the rest of the program once per state. */
volatile u32 opaque_state = 0;

static __always_inline enum thread_state state_of_bits(const struct task_struct *task, u32 state)
{
	if (!(state & ~TASK_WAKING))
		return is_throttled(task) ? STATE_THROTTLED : STATE_READY;
	switch (stopper_of(task, state)) {
	case STOPPED_BY_SIGNAL:
		return STATE_STOPPED;
	case STOPPED_BY_TRACER:
		return STATE_TRACED;
	case STOPPED_BY_FREEZER:
		return STATE_FROZEN;
	default:
		break;
	}
	if (state & TASK_INTERRUPTIBLE)
		return STATE_SLEEPING;
	if ((state & TASK_UNINTERRUPTIBLE) && (state & TASK_NOLOAD))
		return STATE_IDLE;
	if (state & (TASK_UNINTERRUPTIBLE | TASK_RTLOCK_WAIT))
		return STATE_UNINTERRUPTIBLE;
	if (state & TASK_PARKED)
		return STATE_PARKED;
	return STATE_OTHER;
}

static __always_inline u64 switches_of(const struct task_struct *task)
{
	return task->nvcsw + task->nivcsw;
}

/* How far the clock of the thread's run queue is behind: it stops in interrupts and while the vCPU is descheduled. */
static __always_inline u64 behind_ns(const struct task_struct *task)
{
	const struct rq *rq;

	if (!bpf_core_field_exists(struct sched_entity, cfs_rq))
		return 0;
	rq = untrusted(struct task_struct, task)->se.cfs_rq->rq;
	return rq->clock - rq->clock_task;
}

/* Whether a thread that waits for the sampler's CPU ran there when the walk was due: switched in before, queued after. */
static __always_inline bool ran_on_sampler_cpu(const struct task_struct *task)
{
	u64 queued_ns;

	if (!bpf_core_field_exists(task->sched_info.last_queued) || !bpf_core_field_exists(task->sched_info.last_arrival) ||
	    task->thread_info.cpu != bpf_get_smp_processor_id())
		return false;
	queued_ns = task->sched_info.last_queued;
	return queued_ns >= walk_due_clock_ns && task->sched_info.last_arrival <= walk_due_clock_ns && task->se.exec_start + behind_ns(task) >= queued_ns;
}

static __always_inline enum thread_state state_of(const struct task_struct *task)
{
	enum thread_state state = task->on_cpu ? STATE_ON_CPU : state_of_bits(task, task->__state);

	/* If switches are traced, both run slices are seen. */
	if (!traces && state == STATE_READY && ran_on_sampler_cpu(task))
		state = STATE_ON_CPU;
	opaque_state = state;
	return opaque_state;
}

/*
 * The sampler was just switched in, which its exec_start records on the run queue's clock. It may have run since, so the
 * smallest difference is the best one; it may grow by 2 us a walk, as the two clocks drift apart.
 */
static __always_inline void calibrate(u64 now_ns)
{
	struct task_struct *sampler = bpf_get_current_task_btf();
	u64 offset_ns = now_ns - sampler->se.exec_start - behind_ns(sampler);

	if (!has_clock_offset || (s64)(offset_ns - clock_offset_ns) < 2000)
		clock_offset_ns = offset_ns;
	else
		clock_offset_ns += 2000;
	has_clock_offset = true;
}

/* When the walk was due, on the sampler's run queue clock: now, less the sampler's run-queue wait since the last walk. */
static __always_inline void set_walk_due(void)
{
	struct task_struct *sampler = bpf_get_current_task_btf();

	if (!bpf_core_field_exists(sampler->sched_info.run_delay) || !bpf_core_field_exists(sampler->sched_info.last_arrival))
		return;
	walk_due_clock_ns = sampler->sched_info.last_arrival;
	if (sampler_waited_ns)
		walk_due_clock_ns -= sampler->sched_info.run_delay - sampler_waited_ns;
}

/*
 * When a thread last ran if the kernel has reset its exec_start (enqueue_entity()): it was migrated when it was woken, or,
 * since 6.12, when it blocked, for as long as it then sleeps. Computed from its switch-in and the length of its run slice,
 * which lacks time stolen by interrupts and the hypervisor. 0 if neither is known.
 */
static __always_inline u64 last_run_without_exec_start(const struct task_struct *task)
{
	const struct sched_entity *se = &task->se;

	if (!bpf_core_field_exists(task->sched_info.last_arrival) || !bpf_core_field_exists(se->prev_sum_exec_runtime) ||
	    !task->sched_info.last_arrival)
		return 0;
	return task->sched_info.last_arrival + se->sum_exec_runtime - se->prev_sum_exec_runtime;
}

/* When the thread was last switched out. It was seen running, or in another state, at `after_ns`. */
static __always_inline u64 since_of(const struct task_struct *task, u64 after_ns, u64 now_ns)
{
	u64 ran_ns = task->se.exec_start;
	u64 since_ns;

	if (ran_ns)
		ran_ns += behind_ns(task);
	else
		ran_ns = last_run_without_exec_start(task);
	if (!ran_ns)
		return now_ns;
	since_ns = ran_ns + clock_offset_ns;
	if (since_ns > now_ns)
		return now_ns;
	return since_ns < after_ns ? after_ns : since_ns;
}

/* ID of the thread's process; 0 if there is no room. */
static __always_inline u32 process_of(const struct task_struct *task)
{
	struct process_key key = {};
	struct process_value value = {};
	struct process_value *known;

	key.started_ns = BPF_CORE_READ(task, group_leader, start_time);
	key.tgid = task->tgid;
	key.execs = task->self_exec_id;
	known = bpf_map_lookup_elem(&process_by_key, &key);
	if (known)
		return known->id;
	value.id = __sync_fetch_and_add(&processes, 1) + 1;
	value.tgid = shown_process(task);
	BPF_CORE_READ_STR_INTO(&value.comm, task, group_leader, comm);
	if (!bpf_map_update_elem(&process_by_key, &key, &value, BPF_NOEXIST))
		return value.id;
	/* Another CPU was faster, or there is no room. */
	known = bpf_map_lookup_elem(&process_by_key, &key);
	return known ? known->id : 0;
}

/* Global, so that it is verified by itself, once. Its own loop takes a fifth of the time of bpf_loop(). */
__noinline int hash_stack(const struct stack_value *stack, u32 process, struct stack_key *key)
{
	u64 first, second;

	if (!stack || !key)
		return -1;
	first = (u64)process << 32 | stack->length;
	second = ~first;
	for (u32 i = 0; i < MAX_FRAMES && i < stack->length; i++) {
		u64 frame = stack->frames[i];

		first = (first ^ frame) * 0x9e3779b97f4a7c15ull;
		first ^= first >> 29;
		second = (second + frame) * 0xd6e8feb86659fd93ull;
		second ^= second >> 32;
	}
	key->hash[0] = first;
	key->hash[1] = second;
	return 0;
}

/* ID of a stack, a new one if the stack is not known; 0 if there is no room. */
static __always_inline u32 number_of_stack(struct stack_value *stack, u32 process)
{
	struct stack_value *known;
	struct stack_key key = {};

	hash_stack(stack, process, &key);
	known = bpf_map_lookup_elem(&stack_by_hash, &key);
	if (known)
		return known->id;
	stack->id = __sync_fetch_and_add(&stacks, 1) + 1;
	if (!bpf_map_update_elem(&stack_by_hash, &key, stack, BPF_NOEXIST))
		return stack->id;
	known = bpf_map_lookup_elem(&stack_by_hash, &key);
	return known ? known->id : 0;
}

static __always_inline bool has_user_frames(const struct task_struct *task)
{
	return read_user_stacks && !(task->flags & (PF_KTHREAD | PF_IO_WORKER | PF_USER_WORKER));
}

enum capture {
	CAPTURE_OK,
	CAPTURE_AGAIN,
	CAPTURE_NO_ROOM,
};

/* The cached user stack of these registers. */
static __always_inline struct seen_user_stack *seen_in_walks(struct task_struct *task, u32 process)
{
	const struct pt_regs *regs = (const struct pt_regs *)bpf_task_pt_regs(task);
	u32 slot = 0;

	if (bpf_core_field_exists(regs->ip))
		slot = slot_of_user_stack(regs, process);
	return bpf_map_lookup_elem(&user_stack_by_seen_in_walks, &slot);
}

static __always_inline enum capture capture_stacks(struct task_struct *task, struct place_key *key, bool was_unread)
{
	enum user_end end = USER_COMPLETE;
	struct scratch *scratch;
	u32 zero = 0;
	long bytes;

	scratch = bpf_map_lookup_elem(&scratch_of_sampler, &zero);
	if (!scratch)
		return CAPTURE_NO_ROOM;
	bytes = bpf_get_task_stack(task, scratch->kernel.frames, sizeof(scratch->kernel.frames), 0);
	if (bytes > 0) {
		u32 length = (u64)bytes / 8;

		scratch->kernel.length = length < max_depth ? length : max_depth;
		key->kernel_stack = number_of_stack(&scratch->kernel, 0);
		if (!key->kernel_stack)
			return CAPTURE_NO_ROOM;
	}
	if (has_user_frames(task)) {
		struct seen_user_stack *seen = seen_in_walks(task, key->process);

		if (!seen)
			return CAPTURE_NO_ROOM;
		end = unwind_user(task, scratch, key->process, &seen, false);
		if (end == USER_SEEN) {
			key->user_stack = seen->id;
			key->user_end = USER_COMPLETE;
			return CAPTURE_OK;
		}
		if (end == USER_UNKNOWN) {
			if (!is_last_round)
				return CAPTURE_AGAIN;
			end = USER_PARTLY;
		}
		if (end == USER_UNREAD) {
			/* Changing mappings mostly takes microseconds; this process was unresponsive in the last walk too. */
			if (!is_last_round && !was_unread) {
				unanswered++;
				return CAPTURE_AGAIN;
			}
			lose(LOST_UNREAD);
			unread_now = UNREAD_MEMORY;
		}
		if (scratch->user.length) {
			key->user_stack = number_of_stack(&scratch->user, key->process);
			if (!key->user_stack)
				return CAPTURE_NO_ROOM;
			end_keeping(seen, key->user_stack, end == USER_COMPLETE);
		}
	}
	key->user_end = end;
	return CAPTURE_OK;
}

/* Fills in the key except for the stacks; false if there is no room for the process. */
static __always_inline bool fill_key(struct task_struct *task, struct thread_record *record, struct place_key *key)
{
	key->is_kernel = (task->flags & PF_KTHREAD) != 0;
	if (!record->process || record->generation != generation + 1 || record->execs != task->self_exec_id) {
		record->process = process_of(task);
		record->execs = task->self_exec_id;
	}
	key->process = record->process;
	key->tid = by_thread ? shown_number(task) : 0;
	key->cgroup = cgroup_number_of(untrusted(struct task_struct, task));
	key->syscall = -1;
	BPF_CORE_READ_STR_INTO(&key->comm, task, comm);
	return record->process != 0;
}

#include "count.bpf.h"

/* The record of a thread; NULL if it has none. */
static __always_inline struct thread_record *record_of(struct task_struct *task)
{
	struct thread_record *record;
	u32 slot = task->pid & records_mask;

	if (!traces) {
		record = bpf_map_lookup_elem(&record_by_slot, &slot);
		if (record && record->started_ns == task->start_time)
			return record;
	}
	return bpf_task_storage_get(&record_by_thread, task, 0, 0);
}

/* CAPTURE_OK with the place, or why there is none. */
static __always_inline enum capture place_of(struct task_struct *task, struct thread_record *record, enum thread_state state,
					    u64 switches, u32 *place, enum lost_reason *reason)
{
	struct place_key key = {};
	bool was_unread = record->unread == UNREAD_MEMORY;

	*reason = LOST_PROCESSES;
	if (!fill_key(task, record, &key))
		return CAPTURE_NO_ROOM;
	key.state = state;
	unread_now = UNREAD_NOTHING;
	if (state != STATE_ON_CPU) {
		enum capture result;

		key.in_iowait = BPF_CORE_READ_BITFIELD(task, in_iowait);
		if (!key.is_kernel)
			key.syscall = syscall_of(task);
		*reason = LOST_STACKS;
		result = capture_stacks(task, &key, was_unread);
		if (result != CAPTURE_OK)
			return result;
		/* It is the same wait if the thread has not run since; a running thread is counted when it blocks. */
		if (switches_of(task) != switches || state_of(task) != state) {
			if (!is_last_round)
				return CAPTURE_AGAIN;
			lose(LOST_TORN);
			key.kernel_stack = 0;
			key.user_stack = 0;
			key.syscall = -1;
			key.user_end = USER_TORN;
		}
	}
	*reason = LOST_PLACES;
	*place = number_of_place(&key);
	if (*place == PLACES)
		return CAPTURE_NO_ROOM;
	if (traces)
		remember_ready_place(*place, &key);
	return CAPTURE_OK;
}

static __always_inline void count(struct thread_record *record, u64 now_ns, u32 waits)
{
	u64 ns = take_time(record, now_ns);

	/* If switches are traced, a thread is visited in each state, since it may change to a selected one. */
	if (!traces || wanted_states & 1u << (record->state & 31))
		add(record->place, ns, 1, waits);
}

static __noinline void update_record(struct task_struct *task, struct thread_record *record, enum thread_state state, u64 now_ns)
{
	u64 switches = switches_of(task);
	bool is_other = !traces && record->half_address != low_half((u64)task);
	bool has_run = !record->is_known || record->switches != switches || is_other;
	enum lost_reason reason;
	enum capture result;
	u32 place = 0;

	if (traces && is_tracing && state == STATE_ON_CPU && !has_run && record->state != STATE_ON_CPU && record->generation == generation + 1) {
			/* The thread is being switched out; or its switch-in was not seen, and it still runs in the last round. */
		if (!is_last_round) {
			record->is_unresolved = true;
			unresolved++;
			return;
		}
		count_unseen_run(task, record, now_ns);
	}
	result = place_of(task, record, state, switches, &place, &reason);
		/*
		 * Looked up again, with the same result, as only this thread reuses records: otherwise the verifier would
		 * verify taking the stacks once for each map that the record may be in.
		 */
	record = record_of(task);
	if (!record) {
		lose(LOST_THREADS);
		return;
	}
	record->unread = unread_now;
	if (result != CAPTURE_OK && !is_last_round) {
		/* The next round may find memory that is unresponsive now. */
		record->is_unresolved = true;
		unresolved++;
		return;
	}
	/* Before the time is counted, while `counted_ns` is still the time of the last visit. */
	if (has_run || record->state != state) {
		u64 after_ns = BPF_CORE_READ(task, start_time);

		if (record->is_known)
			after_ns = record->counted_ns;
		record->since_ns = since_of(task, after_ns, now_ns);
	}
	record->is_unresolved = false;
	record->is_new = false;
	record->is_lost = result != CAPTURE_OK;
	record->state = state;
	record->is_known = true;
	record->place = place;
	record->generation = result == CAPTURE_OK ? generation + 1 : 0;
	if (traces && state == STATE_ON_CPU) {
		record->on_cpu_place = place + 1;
		record->on_cpu_generation = record->generation;
	}
	if (!traces)
		record->half_address = low_half((u64)task);
	/* Written last, on every architecture: a thread switched out concurrently has another count, so overwriting shows. */
	__sync_lock_test_and_set(&record->switches, switches);
	if (result != CAPTURE_OK) {
		lose(reason);
		take_time(record, now_ns);
		return;
	}
	count(record, now_ns, has_run);
}

/* Allocates a record for a thread; NULL if there is no memory. */
static __always_inline struct thread_record *new_record(struct task_struct *task)
{
	struct thread_record *record;
	u32 slot = task->pid & records_mask;

	if (!traces) {
		record = bpf_map_lookup_elem(&record_by_slot, &slot);
		if (record && (!record->started_ns || record->counted_ns < last_walk_ns)) {
			__builtin_memset(record, 0, sizeof(*record));
			record->started_ns = task->start_time;
			return record;
		}
	}
	return bpf_task_storage_get(&record_by_thread, task, 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
}

/* The thread is in the same wait, or on a CPU, as at the last visit. */
static __always_inline bool has_not_run(const struct task_struct *task, const struct thread_record *record)
{
	u32 state;

	if (record->generation != generation + 1 || record->is_unresolved || record->is_skipped || record->unread == UNREAD_MEMORY ||
	    (record->unread == UNREAD_CODE && retries_code) || record->switches != switches_of(task))
		return false;
	/* Switches are seen in any state, except for a few. */
	if (traces && is_tracing)
		return record->is_known && (record->state == STATE_ON_CPU || !task->on_cpu);
	if (task->on_cpu || (!traces && record->half_address != low_half((u64)task)))
		return false;
	opaque_state = state_of_bits(task, task->__state);
	state = opaque_state;
	return state == record->state;
}

/* 0.1 us for a thread that is not selected, 0.3 us for one that has not run, 2 us and more for others. */
SEC("iter.s/task")
int on_each_thread(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	struct thread_record *record;
	enum thread_state state;
	u64 switches, now_ns;

	if (!is_calibrated) {
		walk_now_ns = bpf_ktime_get_ns();
		calibrate(walk_now_ns);
		set_walk_due();
		is_calibrated = true;
	}
	if (!task) {
		task = bpf_get_current_task_btf();
		if (bpf_core_field_exists(task->sched_info.run_delay))
			sampler_waited_ns = task->sched_info.run_delay;
		return 0;
	}
	record = record_of(task);
	/* Nothing else is read of most threads: each field in another cache line costs as much as all the rest. */
	if (record && has_not_run(task, record)) {
		if (walk_round == 0)
			threads_visited++;
		else if (!record->is_unresolved)
			return 0;
		/* A visit takes less than a microsecond. */
		if (!(threads_visited % VISITS_PER_CLOCK_READ))
			walk_now_ns = bpf_ktime_get_ns();
		if (traces && is_tracing)
			count_traced(task, record, walk_now_ns);
		else
			count(record, walk_now_ns, 0);
		return 0;
	}
	if (task->exit_state || task->tgid == own_tgid || (wanted_tgid && task->tgid != wanted_tgid))
		return 0;
	if (!record && walk_round == 0)
		record = new_record(task);
	if (!record) {
		if (walk_round == 0)
			lose(LOST_THREADS);
		return 0;
	}
	if (walk_round == 0)
		threads_visited++;
	else if (!record->is_unresolved)
		return 0;
	now_ns = bpf_ktime_get_ns();
	walk_now_ns = now_ns;
	switches = switches_of(task);
	if (!record->counted_ns)
		record->counted_ns = task->start_time > began_ns ? task->start_time : began_ns;
	else if (record->switches == switches && record->is_skipped) {
		record->counted_ns = now_ns;
		return 0;
	}
	state = state_of(task);
	/* A thread may be renamed, and moved to another cgroup. */
	record->is_skipped = !is_wanted(task, task->flags & PF_KTHREAD);
	if (record->is_skipped || (!traces && !(wanted_states & 1u << state))) {
		record->switches = switches;
		take_time(record, now_ns);
		record->generation = 0;
		return 0;
	}
	threads_changed++;
	update_record(task, record, state, now_ns);
	return 0;
}

/* Reports to user space since when each thread waits, after a walk. */
SEC("iter/task")
int on_each_thread_tell(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	struct thread_record *record;
	struct thread_now now = {};

	if (!task || task->exit_state)
		return 0;
	record = record_of(task);
	if (!record || !record->is_known || record->is_skipped || record->generation != generation + 1)
		return 0;
	now.since_ns = record->since_ns;
	now.place = record->place;
	now.tid = task->pid;
	now.tgid = task->tgid;
	now.state = record->state;
	now.shown = shown_number(task);
	now.switches = record->switches;
	bpf_seq_write(ctx->meta->seq, &now, sizeof(now));
	return 0;
}

#include "trace.bpf.h"
#include "wakers.bpf.h"
#include "holders.bpf.h"
