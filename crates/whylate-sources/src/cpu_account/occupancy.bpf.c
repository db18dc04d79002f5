// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Keeps the CPU account: each event that changes a CPU's occupant ends one interval and starts the next, so that each instant belongs to
 * exactly one occupant. An interrupt nests in a softirq, and a softirq in a thread.
 */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include "compat.bpf.h"
#include "ways.bpf.h"
#include "keep_account.bpf.h"
#include "keep_items.bpf.h"
#include "keep_requests.bpf.h"
#include "steps.bpf.h"
#include "irq_vectors.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Never holds data: puts the types that user space shares into the skeleton. */
struct {
	struct account account;
	struct window window;
	struct unexplained unexplained;
	struct wakeup wakeup;
	struct lateness lateness;
	struct late_stack late_stack;
	struct disk_request disk_request;
	struct run_queue_move run_queue_move;
	enum occupant_kind occupant_kind;
	enum entry_kind entry_kind;
	enum left_bits left_bits;
	enum stopper stopper;
	enum disk_operation disk_operation;
	enum irq_vector irq_vector;
	enum busy_pools busy_pools;
	enum wakeup_limits wakeup_limits;
	enum occupancy_limits occupancy_limits;
	enum switch_step switch_step;
	enum waking_step waking_step;
	enum vector_step vector_step;
} layouts = {};

enum {
	/* Stacks may take at most 1/STACK_SHARE of the time. */
	STACK_SHARE = 16,
};

/* Function of heartbeat timers. Their lateness counts because they are only armed for the future. 0: none. */
const volatile u64 heartbeat_function = 0;
/* Function of the CPU's tick, which is only armed for the future too. */
const volatile u64 tick_function = 0;

/* Minimum lateness that is recorded. */
const volatile u64 late_from_ns = 100000;

/* Function of timers that wake a thread, if those of a source's own threads count. 0: they do not. */
const volatile u64 wakeup_function = 0;
/* PID in the initial namespace. */
const volatile u32 own_process = 0;
/* Function of the timerlat tracer's timers. 0: they do not count. */
const volatile u64 tracer_function = 0;

/* Minimum off-CPU time after which a thread's switch-in calls the program that explains waits. 0: there is none. */
u64 explain_waits_over_ns = 0;

/* Length of late_interrupt_stacks, a power of two. */
const volatile u32 late_stack_slots = MAX_LATE_STACKS;

/* Whether a thread was seen that may be a submission thread of io_uring. */
u32 has_sq_thread = 0;

/* Stacks of the latest late interrupts, overwritten oldest first. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	/* User space reduces it if there are few CPUs. */
	__uint(max_entries, MAX_LATE_STACKS);
	__type(key, u32);
	__type(value, struct late_stack);
} late_interrupt_stacks SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, WAKING_STEPS);
	__type(key, u32);
	__type(value, u32);
} steps_of_waking SEC(".maps");

/* Programs of a source that runs at all vectors, which saves it a link for each. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, VECTOR_STEPS);
	__type(key, u32);
	__type(value, u32);
} steps_of_vectors SEC(".maps");

/* Whether there are such programs. */
u32 has_vector_steps = 0;

/* Number of stacks of late interrupts so far. */
u32 late_stacks = 0;

/* A thread without a recorded switch-in leaves the CPU. Its switch-out is counted already. */
static __always_inline void find_leaving(struct account *account, u32 cpu, struct task_struct *task, u64 now_ns)
{
	end_unseen(account, cpu, unseen_switch_in_ns(account, task, now_ns, true));
	enter_thread(account, task, cgroup_number_of(untrusted(struct task_struct, task)));
	if (keeps_all_wakeups)
		fill_unseen_entry(account, cpu, task, switches_before(task) - 1);
}

/* `queue` is the queue of `next`. Pointers of threads are read before branches: see untrusted(). */
static __always_inline void switch_occupant(struct account *account, u32 cpu, bool preempt, struct task_struct *prev, struct task_struct *next,
					    const struct cfs_rq *queue, u32 prev_state, u64 now_ns)
{
	u64 cgroup = cgroup_number_of(next);
	bool is_open = open(account, cpu);
	u16 left = 0;

	if (is_open && __builtin_expect(has_new_tid(account, prev), 0))
		change_tid(account, cpu, now_ns - 1);
	if (is_open && is_astray(account, prev))
		find_leaving(account, cpu, prev, now_ns);
	/* A thread that is still runnable was preempted, or has yielded. */
	if (keeps_all_wakeups && prev->pid && (preempt || !prev->__state))
		keep_wait(prev, false, NULL, now_ns);
	if (keeps_all_wakeups)
		keep_throttle(prev, now_ns);
	if (!is_open) {
		miss_switch(account, now_ns);
		return;
	}
	if (keeps_all_wakeups)
		left = switch_out_flags(prev, preempt, prev_state);
	/* The scheduler updates the run queue's clock before it switches. */
	end_interval(account, cpu, now_ns, steal_ns_of_queue(queue), left);

	/* With PREEMPT_RT a softirq may be preempted; it is then known by its thread. */
	account->in_irq = false;
	account->softirq = 0;
	if (account->own_pool)
		leave_worker(account, preempt);
	enter_thread(account, next, cgroup);
	if (keeps_all_wakeups) {
		account->in_timer = false;
		account->completed[IN_IRQ] = 0;
		fill_entry(account, cpu, next, switches_before(next), true);
	}
	if (__builtin_expect(account->astray, 0) && bpf_core_field_exists(next->se.cfs_rq))
		account->clock_behind_ns = now_ns - queue->rq->clock;
	close_account(account);
}

/* Returns the sources' programs that a switch concerns; nearly always none. */
static __always_inline u32 steps_of(const struct account *account, const struct task_struct *prev, const struct task_struct *next,
				    const struct cfs_rq *queue)
{
	u32 steps = 0;

	if (account->measured_task == (u64)next)
		steps |= 1 << STEP_TIMERLAT;
	if ((prev->flags | next->flags) & PF_IO_WORKER)
		steps |= 1 << STEP_SQPOLL;
	/* Nearly all threads have run more recently. */
	if (explain_waits_over_ns && next->pid && off_cpu_ns_by(queue, next) >= explain_waits_over_ns)
		steps |= 1 << STEP_RUNNABLE;
	return steps;
}

/* Returns only if no such program is registered. */
static __always_inline void call_step(void *ctx, struct account *account, u32 step)
{
	if (!(account->steps & 1 << step))
		return;
	account->steps &= ~(1 << step);
	bpf_tail_call(ctx, &steps_of_switch, step);
}

static __always_inline void call_steps(void *ctx, struct account *account)
{
	call_step(ctx, account, STEP_TIMERLAT);
	call_step(ctx, account, STEP_SQPOLL);
	call_step(ctx, account, STEP_RUNNABLE);
}

SEC("tp_btf/sched_switch")
int BPF_PROG(on_sched_switch, bool preempt, struct task_struct *prev, struct task_struct *next, unsigned int prev_state)
{
	/* Read first: the CPU waits until earlier reads are done. */
	u64 now_ns = bpf_ktime_get_ns();
	const struct cfs_rq *queue = cfs_queue_of(next);
	u32 cpu = bpf_get_smp_processor_id(), steps;
	struct account *account = account_of(cpu);

	if (!account)
		return 0;
	steps = steps_of(account, prev, next, queue);
	if (__builtin_expect(steps, 0)) {
		if (steps & 1 << STEP_SQPOLL && !has_sq_thread && may_be_sq_thread(next))
			has_sq_thread = 1;
		account->steps = steps;
		call_steps(ctx, account);
	}
	switch_occupant(account, cpu, preempt, prev, next, queue, prev_state, now_ns);
	return 0;
}

/* Called by a source's program when it is done. */
SEC("tp_btf/sched_switch")
int BPF_PROG(on_sched_switch_after_step, bool preempt, struct task_struct *prev, struct task_struct *next, unsigned int prev_state)
{
	const struct cfs_rq *queue = cfs_queue_of(next);
	u32 cpu = bpf_get_smp_processor_id();
	struct account *account = account_of(cpu);

	if (!account)
		return 0;
	call_steps(ctx, account);
	switch_occupant(account, cpu, preempt, prev, next, queue, prev_state, bpf_ktime_get_ns());
	return 0;
}

/* Finds submission threads that no switch shows: they sleep, or occupy a CPU all the time. */
SEC("?iter/task")
int find_sq_thread(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;

	if (task && may_be_sq_thread(task))
		has_sq_thread = 1;
	return 0;
}

/* The current thread is the worker of an item that starts or ends; in a softirq it is the interrupted thread. */
static __always_inline int item_changes(u64 handler, const struct entry *begins)
{
	struct task_struct *task = bpf_get_current_task_btf();
	u32 cpu = bpf_get_smp_processor_id();
	struct account *account;

	if (!(task->flags & PF_WQ_WORKER))
		return 0;
	hold_cpu();
	account = open_account(cpu);
	if (account) {
		/* After a switch to the worker in between, the handler was read from the worker already. */
		if (account->since_ns && !account->softirq && !account->in_irq && (account->handler != handler || begins)) {
			end_interval_of_thread(account, cpu);
			account->handler = handler;
			account->own_pool = handler ? pool_of_worker(task) : 0;
			if (begins)
				account->entry = *begins;
		}
		close_account(account);
	}
	let_cpu_go();
	return 0;
}

SEC("tp_btf/workqueue_execute_start")
int BPF_PROG(on_workqueue_execute_start, struct work_struct *work)
{
	struct entry queuer = {};

	/* For each item, also outside workers, so that its entry becomes free. */
	if (keeps_all_wakeups)
		take_queuer(&queuer, work);
	return item_changes((u64)work->func, queuer.kind ? &queuer : NULL);
}

SEC("tp_btf/workqueue_execute_end")
int BPF_PROG(on_workqueue_execute_end, struct work_struct *work)
{
	return item_changes(0, NULL);
}

SEC("tp_btf/softirq_entry")
int BPF_PROG(on_softirq_entry, unsigned int number)
{
	u32 cpu = bpf_get_smp_processor_id();
	struct account *account;

	/* With PREEMPT_RT a thread runs softirqs. */
	hold_cpu();
	account = open_account(cpu);
	if (account) {
		if (account->since_ns) {
			end_interval_of_thread(account, cpu);
			account->softirq = number + 1;
			account->completed[IN_SOFTIRQ] = 0;
			account->timers[IN_SOFTIRQ] = 0;
		}
		close_account(account);
	}
	let_cpu_go();
	return 0;
}

SEC("tp_btf/softirq_exit")
int BPF_PROG(on_softirq_exit, unsigned int number)
{
	u32 cpu = bpf_get_smp_processor_id();
	struct account *account;

	hold_cpu();
	account = open_account(cpu);
	if (account) {
		if (account->softirq) {
			end_interval_of_thread(account, cpu);
			if (is_of_network(account)) {
				account->net_raisers[number & 1] = 0;
				account->net_timers[number & 1] = 0;
			}
			account->softirq = 0;
			account->timers[IN_SOFTIRQ] = 0;
			account->in_timer = false;
		}
		close_account(account);
	}
	let_cpu_go();
	return 0;
}

static __always_inline void enter_irq(struct account *account, u32 cpu, u32 kind, u32 id)
{
	end_interval_of_thread(account, cpu);
	account->in_irq = true;
	account->irq_kind = kind;
	account->irq_id = id;
	account->completed[IN_IRQ] = 0;
	account->timers[IN_IRQ] = 0;
	account->lateness.late_ns = 0;
	account->lateness.stack = -1;
}

static __always_inline int irq_begins(u32 kind, u32 id, const char *name)
{
	u32 cpu = bpf_get_smp_processor_id();
	struct account *account = account_of(cpu);

	if (!account)
		return 0;
	if (!open(account, cpu)) {
		/* Wakeups are by this interrupt from here on, which may not be a timer's. */
		account->in_timer = false;
		return 0;
	}
	if (account->since_ns) {
		enter_irq(account, cpu, kind, id);
		account->in_timer = false;
		if (name)
			bpf_probe_read_kernel_str(account->irq_name, sizeof(account->irq_name), name);
	}
	close_account(account);
	return 0;
}

static __always_inline int irq_ends(void)
{
	u32 cpu = bpf_get_smp_processor_id();
	struct account *account = open_account(cpu);

	if (!account)
		return 0;
	if (account->in_irq) {
		end_interval_of_thread(account, cpu);
		account->in_irq = false;
		account->in_timer = false;
		account->completed[IN_IRQ] = 0;
	}
	close_account(account);
	return 0;
}

SEC("tp_btf/irq_handler_entry")
int BPF_PROG(on_irq_handler_entry, int irq, struct irqaction *action)
{
	return irq_begins(OCCUPANT_DEVICE_IRQ, irq, action->name);
}

SEC("tp_btf/irq_handler_exit")
int BPF_PROG(on_irq_handler_exit)
{
	return irq_ends();
}

SEC("raw_tp")
int BPF_PROG(on_irq_vector_entry, int vector)
{
	irq_begins(OCCUPANT_VECTOR, vector_of(vector), NULL);
	if (has_vector_steps)
		bpf_tail_call(ctx, &steps_of_vectors, VECTOR_STEP_ENTRY);
	return 0;
}

SEC("raw_tp")
int BPF_PROG(on_irq_vector_exit)
{
	irq_ends();
	if (has_vector_steps)
		bpf_tail_call(ctx, &steps_of_vectors, VECTOR_STEP_EXIT);
	return 0;
}

/* arm64: the reason is a text, such as "Rescheduling interrupts". */
SEC("?tp_btf/ipi_entry")
int BPF_PROG(on_ipi_entry, const char *reason)
{
	return irq_begins(OCCUPANT_VECTOR, VECTOR_NAMED, reason);
}

SEC("?tp_btf/ipi_exit")
int BPF_PROG(on_ipi_exit)
{
	return irq_ends();
}

/* x86: comes after the handler, with its run time. */
SEC("?tp_btf/nmi_handler")
int BPF_PROG(on_nmi_handler, void *handler, s64 delta_ns)
{
	struct account *account = account_of(bpf_get_smp_processor_id());

	/* NMIs do not nest, and only an NMI interrupts an NMI's handler. */
	if (account && delta_ns > 0)
		account->nmi_ns += delta_ns;
	return 0;
}

/* On a slow machine, taking a stack can make the next interrupt late, and so on: leave a pause after each. */
static __always_inline s32 stack_of_late(void *ctx, struct account *account)
{
	u64 now_ns = bpf_ktime_get_ns();
	struct late_stack *stack;
	u32 number, place;

	if (now_ns < account->next_stack_ns)
		return -1;
	number = __sync_fetch_and_add(&late_stacks, 1) & LATE_STACK_NUMBERS;
	place = number & (late_stack_slots - 1);
	stack = bpf_map_lookup_elem(&late_interrupt_stacks, &place);
	if (!stack)
		return -1;
	store_in_order(&stack->number, 0);
	stack->bytes = bpf_get_stack(ctx, stack->frames, sizeof(stack->frames), 0);
	store_in_order(&stack->number, (u64)number + 1);
	account->next_stack_ns = now_ns + STACK_SHARE * since(bpf_ktime_get_ns(), now_ns);
	return stack->bytes > 0 ? (s32)number : -1;
}

/*
 * Tests whether the timer's lateness shows disabled interrupts, because it is never armed for the past. A stopped thread of this process
 * may arm one so; its source knows then.
 */
static __always_inline bool timer_counts(const struct hrtimer *timer)
{
	u64 function = (u64)timer->function;

	if (function == heartbeat_function || function == tick_function)
		return true;
	if (tracer_function && function == tracer_function)
		return true;
	if (!wakeup_function || function != wakeup_function)
		return false;
	/* The timer is its first member. */
	return (u32)BPF_CORE_READ((const struct hrtimer_sleeper *)timer, task, tgid) == own_process;
}

/*
 * A late timer shows that interrupts were off at least since it was due. The interrupted stack shows who enabled them, because the
 * interrupt comes in right there.
 */
SEC("tp_btf/hrtimer_expire_entry")
int BPF_PROG(on_hrtimer_expire_entry, struct hrtimer *timer)
{
	u32 cpu = bpf_get_smp_processor_id();
	struct account *account;
	u64 due_ns, late_ns;

	if (keeps_all_wakeups)
		hrtimer_begins((u64)timer->function);
	if (!timer_counts(timer))
		return 0;
	due_ns = timer->node.expires;
	account = open_account(cpu);
	if (!account)
		return 0;
	if (timer_is_unannounced && !account->in_irq && account->since_ns && !timer->is_soft)
		enter_irq(account, cpu, OCCUPANT_VECTOR, VECTOR_UNANNOUNCED_TIMER);
	late_ns = since(account->since_ns, due_ns);
	if (account->in_irq && account->since_ns && late_ns >= late_from_ns && late_ns > account->lateness.late_ns) {
		account->lateness.late_ns = late_ns > 0xffffffff ? 0xffffffff : late_ns;
		account->lateness.stack = stack_of_late(ctx, account);
		if (account->lateness.stack < 0)
			account->stacks_lost++;
	}
	close_account(account);
	return 0;
}

/* Loaded where the timer's interrupt has no tracepoint: the rest of the interrupt counts for what it interrupted. */
SEC("?tp_btf/hrtimer_expire_exit")
int BPF_PROG(on_hrtimer_expire_exit)
{
	struct account *account = account_of(bpf_get_smp_processor_id());

	if (!account)
		return 0;
	account->in_timer = false;
	if (timer_is_unannounced && account->in_irq && account->irq_kind == OCCUPANT_VECTOR &&
	    account->irq_id == VECTOR_UNANNOUNCED_TIMER)
		irq_ends();
	return 0;
}

/* Wakeups of threads that are no longer asleep do not come here. */
SEC("tp_btf/sched_waking")
int BPF_PROG(on_sched_waking, struct task_struct *task)
{
	if (keeps_all_wakeups)
		keep_waking(task, false);
	else if (task->flags & PF_WQ_WORKER)
		keep_wait(task, true, NULL, bpf_ktime_get_ns());
	if (task->flags & PF_IO_WORKER)
		bpf_tail_call(ctx, &steps_of_waking, WAKING_STEP_SQPOLL);
	return 0;
}

/* The thread is still on its former CPU, but dequeued there. */
SEC("tp_btf/sched_migrate_task")
int BPF_PROG(on_sched_migrate_task, struct task_struct *task, int to_cpu)
{
	struct wakeup *wakeup;

	if (!keeps_all_wakeups && !(task->flags & PF_WQ_WORKER))
		return 0;
	wakeup = wakeup_of(task->pid, task->flags & PF_WQ_WORKER);
	if (!wakeup || wakeup->tid != (u32)task->pid)
		return 0;
	/* The thread is being woken, and was not on its former CPU's run queue. */
	if (task->__state & TASK_WAKING) {
		wakeup->throttled_by = finds_quota_used_up(task, to_cpu) ? THROTTLED_BY_QUOTA : THROTTLED_NOT;
		return 0;
	}
	keep_move(wakeup, task->thread_info.cpu, bpf_ktime_get_ns());
	return 0;
}
