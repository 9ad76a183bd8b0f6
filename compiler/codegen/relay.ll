; The relay between GPUs that cannot write to each other's memory. It copies words from outboxes to inboxes
; (runtime/exchange_layout.py defines these terms), one cache line at a time. A line is copied as soon as no half of its
; words is EMPTY (-1); it is read, its words in the outbox are set to EMPTY, then it is written to the inboxes.
;
; i64 relay(ptr job) copies the requested rounds. It returns when it has found nothing to do `patience` times in a row;
; the next call continues at the same place. It copies one line of each outbox before the next line of any outbox,
; because workgroups of different GPUs wait for each other. Result: number of rounds that are requested but not done.
;
; job: int64[11 + 9 * outboxes]. Several threads have jobs for the same outboxes.
;   0     address of an int64: number of requested rounds
;   1-3   position of this job: rounds done, next line, next outbox
;   4-6   number of outboxes, patience, bytes of a slot
;   7     address of int64[4096]: number of lines in each round, a ring
;   8-10  this job copies stripe [8] and every [9]th stripe after it; a stripe has 2**[10] lines. A job has the same
;         lines in rounds of any size, because it may begin the next round but one while others still copy this round
;   then for each outbox 9 elements: its address, number of inboxes, addresses of the inboxes
; The first round uses the second slot, the next round the first slot, and so on.

target triple = "x86_64-unknown-linux-gnu"

define i64 @relay(ptr noalias %job) nounwind {
entry:
  %done.at = getelementptr i64, ptr %job, i64 1
  %line.at = getelementptr i64, ptr %job, i64 2
  %outbox.at = getelementptr i64, ptr %job, i64 3
  %outboxes.at = getelementptr i64, ptr %job, i64 4
  %patience.at = getelementptr i64, ptr %job, i64 5
  %slot.at = getelementptr i64, ptr %job, i64 6
  %ring.at = getelementptr i64, ptr %job, i64 7
  %part.at = getelementptr i64, ptr %job, i64 8
  %parts.at = getelementptr i64, ptr %job, i64 9
  %shift.at = getelementptr i64, ptr %job, i64 10
  %asked.at = load ptr, ptr %job
  %done.first = load i64, ptr %done.at
  %line.first = load i64, ptr %line.at
  %outbox.first = load i64, ptr %outbox.at
  %outboxes = load i64, ptr %outboxes.at
  %patience = load i64, ptr %patience.at
  %slot = load i64, ptr %slot.at
  %ring = load ptr, ptr %ring.at
  %part = load i64, ptr %part.at
  %parts = load i64, ptr %parts.at
  %shift = load i64, ptr %shift.at
  %stripe = shl i64 1, %shift
  %stripe.last = sub i64 %stripe, 1
  %turn = shl i64 %parts, %shift
  %before = shl i64 %part, %shift
  br label %round

round:
  %done = phi i64 [ %done.first, %entry ], [ %done.next, %round.done ]
  %outbox.begin = phi i64 [ %outbox.first, %entry ], [ 0, %round.done ]
  %line.begin = phi i64 [ %line.first, %entry ], [ 0, %round.done ]
  br label %ask

ask:
  %asked.idle = phi i64 [ 0, %round ], [ %asked.idle.next, %ask.wait ]
  %asked = load volatile i64, ptr %asked.at
  %more = icmp slt i64 %done, %asked
  br i1 %more, label %round.begin, label %ask.wait

ask.wait:
  call void @llvm.x86.sse2.pause()
  %asked.idle.next = add i64 %asked.idle, 1
  %asked.enough = icmp sge i64 %asked.idle.next, %patience
  br i1 %asked.enough, label %end, label %ask

round.begin:
  %number = add i64 %done, 1
  %entry.number = and i64 %done, 4095
  %all.at = getelementptr i64, ptr %ring, i64 %entry.number
  %all.lines = load volatile i64, ptr %all.at
  %turns = udiv i64 %all.lines, %turn
  %of.turns = shl i64 %turns, %shift
  %in.turns = mul i64 %turns, %turn
  %rest = sub i64 %all.lines, %in.turns
  %rest.here = sub i64 %rest, %before
  %rest.some = call i64 @llvm.smax.i64(i64 %rest.here, i64 0)
  %rest.own = call i64 @llvm.smin.i64(i64 %rest.some, i64 %stripe)
  %lines = add i64 %of.turns, %rest.own
  %parity = and i64 %number, 1
  %offset = mul i64 %parity, %slot
  %some = icmp slt i64 %line.begin, %lines
  br i1 %some, label %line, label %round.done

line:
  %l = phi i64 [ %line.begin, %round.begin ], [ %l.next, %line.done ]
  %outbox.here = phi i64 [ %outbox.begin, %round.begin ], [ 0, %line.done ]
  %l.turn = lshr i64 %l, %shift
  %turn.line = mul i64 %l.turn, %turn
  %l.rest = and i64 %l, %stripe.last
  %stripe.line = add i64 %turn.line, %before
  %own = add i64 %stripe.line, %l.rest
  %place = shl i64 %own, 6
  br label %outbox

outbox:
  %o = phi i64 [ %outbox.here, %line ], [ %o.next, %outbox.done ]
  %entry.words = mul i64 %o, 9
  %entry.word = add i64 %entry.words, 11
  %source.at = getelementptr i64, ptr %job, i64 %entry.word
  %inboxes.at = getelementptr i64, ptr %source.at, i64 1
  %targets = getelementptr i64, ptr %source.at, i64 2
  %source.box = load ptr, ptr %source.at
  %inboxes = load i64, ptr %inboxes.at
  %source = getelementptr i8, ptr %source.box, i64 %offset
  %from = getelementptr i8, ptr %source, i64 %place
  br label %poll

poll:
  %idle = phi i64 [ 0, %outbox ], [ %idle.next, %wait ]
  %words = load volatile <16 x i32>, ptr %from, align 64
  %there = icmp ne <16 x i32> %words, splat (i32 -1)
  %all = call i1 @llvm.vector.reduce.and.v16i1(<16 x i1> %there)
  br i1 %all, label %empty, label %wait

wait:
  call void @llvm.x86.sse2.pause()
  %idle.next = add i64 %idle, 1
  %enough = icmp sge i64 %idle.next, %patience
  br i1 %enough, label %suspend, label %poll

empty:
  store volatile <16 x i32> splat (i32 -1), ptr %from, align 64
  br label %copies

copies:
  %t = phi i64 [ 0, %empty ], [ %t.next, %copies ]
  %target.at = getelementptr i64, ptr %targets, i64 %t
  %target.box = load ptr, ptr %target.at
  %target = getelementptr i8, ptr %target.box, i64 %offset
  %to = getelementptr i8, ptr %target, i64 %place
  store <16 x i32> %words, ptr %to, align 64, !nontemporal !0
  %t.next = add i64 %t, 1
  %t.more = icmp slt i64 %t.next, %inboxes
  br i1 %t.more, label %copies, label %outbox.done

outbox.done:
  %o.next = add i64 %o, 1
  %o.more = icmp slt i64 %o.next, %outboxes
  br i1 %o.more, label %outbox, label %line.done

line.done:
  %l.next = add i64 %l, 1
  %l.more = icmp slt i64 %l.next, %lines
  br i1 %l.more, label %line, label %round.done

round.done:
  call void @llvm.x86.sse.sfence()
  %done.next = add i64 %done, 1
  br label %round

suspend:
  call void @llvm.x86.sse.sfence()
  br label %end

end:
  %o.end = phi i64 [ %outbox.begin, %ask.wait ], [ %o, %suspend ]
  %l.end = phi i64 [ %line.begin, %ask.wait ], [ %l, %suspend ]
  store i64 %done, ptr %done.at
  store i64 %o.end, ptr %outbox.at
  store i64 %l.end, ptr %line.at
  %asked.last = load volatile i64, ptr %asked.at
  %left = sub i64 %asked.last, %done
  ret i64 %left
}

declare i1 @llvm.vector.reduce.and.v16i1(<16 x i1>)
declare i64 @llvm.smax.i64(i64, i64)
declare i64 @llvm.smin.i64(i64, i64)
declare void @llvm.x86.sse2.pause()
declare void @llvm.x86.sse.sfence()

!0 = !{i32 1}
