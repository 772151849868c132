-- The queue's state machine: every change of a batch, a shard or a row is one operation in here,
-- and so is atomic. queue.py puts the names of the keys (from contract.py) above this text, and
-- names the operation in ARGV[1].
--
--   batch   uploading -> running -> done | cancelled
--   shard   ready -> leased -> done
--                 <-           (released, or the deadline passed)
--   row     pending -> recorded  (its bit is set once, together with its record; no way back)
--
-- Fence: epoch and owner, both. An epoch alone could repeat after the server lost its last second.
--
-- `deaths` of a shard is the suspicion that one of its rows kills engines. A crash that was seen
-- counts 2, a lease that ran out counts 1 (sleep and partitions look like that too, and it is
-- taken back when the owner turns out to be alive). A recorded row takes suspicion away.
--
-- A batch with ready shards is in `runnable`, its score is the number of rows leased so far, so
-- the batch that had least comes first.

local LEASES, BATCHES, MODELS, META = K.leases, K.batches, K.models, K.meta

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function digits(number)
  return string.format('%.0f', number)
end

local function make_runnable(batch)
  local state, model, vtime, cancel =
    unpack(redis.call('HMGET', K.batch .. batch, 'state', 'model_key', 'vt', 'cancel'))
  if state ~= 'running' or cancel then
    return
  end
  local key = K.runnable .. model
  local least = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
  -- one that comes late starts level with the others, or it would shut them out
  local start = math.max(tonumber(vtime or '0'), tonumber(least[2] or '0'))
  redis.call('ZADD', key, 'NX', start, batch)
end

local function rest_if_empty(batch)
  if redis.call('LLEN', K.ready .. batch) == 0 then
    local model = redis.call('HGET', K.batch .. batch, 'model_key')
    if model then
      redis.call('ZREM', K.runnable .. model, batch)
    end
  end
end

-- ready -> leased
local function take(shard, batch, owner, deadline)
  redis.call('HSET', K.shard .. shard, 'st', 'leased', 'owner', owner)
  redis.call('ZADD', LEASES, digits(deadline), shard)
  redis.call('SADD', K.held .. owner, shard)
  redis.call('HINCRBY', K.batch .. batch, 'held', 1)
end

-- leased -> (ready | done)
local function leave(shard, batch, owner)
  redis.call('ZREM', LEASES, shard)
  redis.call('SREM', K.held .. owner, shard)
  redis.call('HINCRBY', K.batch .. batch, 'held', -1)
end

-- leased -> ready, at the front: its rows were already begun
local function put_back(shard, batch, owner, suspicion)
  leave(shard, batch, owner)
  redis.call('HSET', K.shard .. shard, 'st', 'ready')
  if suspicion > 0 then
    redis.call('HINCRBY', K.shard .. shard, 'deaths', suspicion)
  end
  redis.call('LPUSH', K.ready .. batch, shard)
  make_runnable(batch)
end

local function forgive(shard)
  redis.call('HDEL', K.shard .. shard, 'late')
  if redis.call('HINCRBY', K.shard .. shard, 'deaths', -EXPIRY) < 0 then
    redis.call('HSET', K.shard .. shard, 'deaths', 0)
  end
end

local function reap(limit)
  local late = redis.call('ZRANGEBYSCORE', LEASES, '-inf', digits(now_ms()), 'LIMIT', 0, limit)
  for i = #late, 1, -1 do
    local shard = late[i]
    local batch, state, epoch, owner =
      unpack(redis.call('HMGET', K.shard .. shard, 'b', 'st', 'epoch', 'owner'))
    if state == 'leased' then
      redis.call('HSET', K.shard .. shard, 'late', owner .. ':' .. epoch)
      put_back(shard, batch, owner, EXPIRY)
    else
      redis.call('ZREM', LEASES, shard)
    end
  end
  return late
end

-- The next shard for a worker, out of the ready list. A suspect goes only to empty hands.
local function pick(model, only, busy)
  local runnable = K.runnable .. model
  local batches = { only }
  if only == '' then
    batches = redis.call('ZRANGE', runnable, 0, 15)
  elseif not redis.call('ZSCORE', runnable, only) then
    return nil
  end
  for _, batch in ipairs(batches) do
    for _, shard in ipairs(redis.call('LRANGE', K.ready .. batch, 0, 15)) do
      local suspect = tonumber(redis.call('HGET', K.shard .. shard, 'deaths') or '0') > 0
      if not (suspect and busy) then
        redis.call('LREM', K.ready .. batch, 1, shard)
        return shard, batch, suspect
      end
    end
  end
  return nil
end

local operation = {}

-- batch, created (s), model key, model (JSON), spec (JSON), schema, max attempts
function operation.create()
  local batch, created, key, model, spec, schema, attempts = unpack(ARGV, 2)
  if redis.call('EXISTS', K.batch .. batch) == 1 then
    return 0
  end
  redis.call('HSET', K.batch .. batch, 'state', 'uploading', 'model_key', key, 'spec', spec,
    'created', created, 'schema', schema, 'max_attempts', attempts, 'total', 0, 'left', 0,
    'rows', 0, 'n_ok', 0, 'n_err', 0, 'shards', 0, 'held', 0)
  redis.call('HSET', MODELS, key, model)
  redis.call('HSETNX', META, 'schema', schema)
  redis.call('HSETNX', META, 'created', created)
  redis.call('ZADD', BATCHES, created, batch)
  return 1
end

-- shard, batch, group, rows, payload -> 1 new, 0 known, -1 the batch takes no more
function operation.add()
  local shard, batch, group, rows, payload = unpack(ARGV, 2)
  if redis.call('SISMEMBER', K.shards .. batch, shard) == 1 then
    return 0
  end
  if redis.call('HGET', K.batch .. batch, 'state') ~= 'uploading' then
    return -1
  end
  redis.call('HSET', K.shard .. shard, 'b', batch, 'g', group, 'n', rows, 'd', 0, 'st', 'ready',
    'p', payload)
  redis.call('SADD', K.shards .. batch, shard)
  redis.call('RPUSH', K.ready .. batch, shard)
  redis.call('HINCRBY', K.batch .. batch, 'shards', 1)
  redis.call('HINCRBY', K.batch .. batch, 'rows', rows)
  return 1
end

local function finish_batch(batch)
  local state = 'done'
  if redis.call('HGET', K.batch .. batch, 'cancel') then
    state = 'cancelled'
  end
  redis.call('HSET', K.batch .. batch, 'state', state, 'finished', digits(now_ms()))
  for _, prefix in ipairs({ K.batch, K.done, K.results, K.shards }) do
    redis.call('EXPIRE', prefix .. batch, KEEP_S)
  end
end

-- uploading -> running. batch, total -> 1 sealed, 0 was sealed before, -1 unknown, -2 rows missing
function operation.seal()
  local batch, total = ARGV[2], tonumber(ARGV[3])
  local state, rows = unpack(redis.call('HMGET', K.batch .. batch, 'state', 'rows'))
  if not state then
    return -1
  elseif state ~= 'uploading' then
    return 0
  elseif tonumber(rows) ~= total then
    return -2
  end
  redis.call('HSET', K.batch .. batch, 'state', 'running', 'total', total, 'left', total,
    'sealed', digits(now_ms()))
  if total == 0 then
    finish_batch(batch)
  else
    make_runnable(batch)
  end
  return 1
end

-- worker, model key, ttl (ms), count, only this batch or '', RQ's list or ''
-- -> shards whose lease ran out, {shard, batch, epoch, deadline, group, payload, deaths, attempts}
function operation.lease()
  local worker, model, ttl, count, only, view = unpack(ARGV, 2)
  local reaped = reap(100)
  local now = now_ms()
  local busy = redis.call('SCARD', K.held .. worker) > 0
  local leases = {}
  for _ = 1, tonumber(count) do
    local shard, batch, suspect = pick(model, only, busy)
    if not shard then
      break
    end
    local deadline = now + ttl
    local epoch = redis.call('HINCRBY', K.shard .. shard, 'epoch', 1)
    take(shard, batch, worker, deadline)
    local group, rows, payload, deaths =
      unpack(redis.call('HMGET', K.shard .. shard, 'g', 'n', 'p', 'deaths'))
    local served = redis.call('ZINCRBY', K.runnable .. model, rows, batch)
    redis.call('HSET', K.batch .. batch, 'vt', served)
    redis.call('HSETNX', K.batch .. batch, 'started', digits(now))
    rest_if_empty(batch)
    if view ~= '' then
      redis.call('LREM', view, 0, shard)
    end
    leases[#leases + 1] = { shard, batch, epoch, deadline, group, payload,
      tonumber(deaths or '0'), tonumber(redis.call('HGET', K.batch .. batch, 'max_attempts')) }
    busy = true
    if suspect then
      break
    end
  end
  return { reaped, leases }
end

-- worker, ttl (ms), RQ's list or '', {shard, epoch}… -> {verdict}…, orphans
function operation.beat()
  local worker, ttl, view = ARGV[2], ARGV[3], ARGV[4]
  local deadline = now_ms() + ttl
  local verdicts, known = {}, {}
  for i = 5, #ARGV, 2 do
    local shard, epoch = ARGV[i], ARGV[i + 1]
    local batch, state, epoch_now, owner, late =
      unpack(redis.call('HMGET', K.shard .. shard, 'b', 'st', 'epoch', 'owner', 'late'))
    local verdict = 'lost'
    local mine = epoch_now == epoch and owner == worker
    if late == worker .. ':' .. epoch then
      forgive(shard)
      if mine and state == 'ready' then -- it ran out while we slept, but nobody took it
        redis.call('LREM', K.ready .. batch, 1, shard)
        take(shard, batch, worker, deadline)
        rest_if_empty(batch)
        if view ~= '' then
          redis.call('LREM', view, 0, shard)
        end
        state = 'leased'
      end
    end
    if batch and redis.call('HGET', K.batch .. batch, 'cancel') then
      verdict = 'cancelled'
    elseif mine and state == 'leased' then
      redis.call('ZADD', LEASES, digits(deadline), shard)
      verdict = 'ok'
    end
    known[shard] = true
    verdicts[#verdicts + 1] = verdict
  end
  -- shards of a lease whose answer never reached the worker
  local orphans = {}
  for _, shard in ipairs(redis.call('SMEMBERS', K.held .. worker)) do
    if not known[shard] then
      local batch, state, owner = unpack(redis.call('HMGET', K.shard .. shard, 'b', 'st', 'owner'))
      if state == 'leased' and owner == worker then
        put_back(shard, batch, worker, 0)
        orphans[#orphans + 1] = shard
      else
        redis.call('SREM', K.held .. worker, shard)
      end
    end
  end
  return { verdicts, orphans }
end

-- shard, epoch, owner, {row, ok 0|1, record}…
-- -> accepted, duplicates, shard done, batch done, fenced
function operation.commit()
  local shard, epoch, owner = ARGV[2], ARGV[3], ARGV[4]
  local batch, state, epoch_now, owner_now, rows, deaths =
    unpack(redis.call('HMGET', K.shard .. shard, 'b', 'st', 'epoch', 'owner', 'n', 'deaths'))
  if epoch_now ~= epoch or owner_now ~= owner or state == 'ready' then
    return { 0, 0, 0, 0, 1 }
  end
  local fine, failed, duplicates = 0, 0, 0
  for i = 5, #ARGV, 3 do
    local row, ok, record = ARGV[i], ARGV[i + 1], ARGV[i + 2]
    if redis.call('SETBIT', K.done .. batch, row, 1) == 1 then
      duplicates = duplicates + 1
    else
      redis.call('XADD', K.results .. batch, '*', 'i', row, 'r', record, 'e', epoch, 'w', owner)
      fine = fine + ok
      failed = failed + 1 - ok
    end
  end
  local accepted = fine + failed
  if accepted > 0 then
    redis.call('HINCRBY', K.batch .. batch, 'n_ok', fine)
    redis.call('HINCRBY', K.batch .. batch, 'n_err', failed)
    local recorded = redis.call('HINCRBY', K.shard .. shard, 'd', accepted)
    if tonumber(deaths or '0') > 0 then
      local attempts = tonumber(redis.call('HGET', K.batch .. batch, 'max_attempts'))
      local careful = CRASH * (attempts - 1)
      redis.call('HSET', K.shard .. shard, 'deaths', tonumber(deaths) >= careful and careful or 0)
    end
    if recorded == tonumber(rows) then
      leave(shard, batch, owner)
      redis.call('HSET', K.shard .. shard, 'st', 'done')
      redis.call('HDEL', K.shard .. shard, 'p', 'late')
      redis.call('EXPIRE', K.shard .. shard, KEEP_S)
      state = 'done'
    end
    if redis.call('HINCRBY', K.batch .. batch, 'left', -accepted) == 0 then
      finish_batch(batch)
    end
  end
  local left = redis.call('HGET', K.batch .. batch, 'left')
  return { accepted, duplicates, state == 'done' and 1 or 0, left == '0' and 1 or 0, 0 }
end

-- shard, epoch, owner, suspicion -> 1, or 0 when it was not held
function operation.release()
  local shard, epoch, owner, suspicion = unpack(ARGV, 2)
  local batch, state, epoch_now, owner_now =
    unpack(redis.call('HMGET', K.shard .. shard, 'b', 'st', 'epoch', 'owner'))
  if state ~= 'leased' or epoch_now ~= epoch or owner_now ~= owner then
    return 0
  end
  put_back(shard, batch, owner, tonumber(suspicion))
  return 1
end

function operation.reap()
  return reap(tonumber(ARGV[2]))
end

-- batch -> 1, or 0 when it is unknown or over. No shard of it is leased from here on.
function operation.cancel()
  local batch = ARGV[2]
  local state, model, rows =
    unpack(redis.call('HMGET', K.batch .. batch, 'state', 'model_key', 'rows'))
  if state ~= 'uploading' and state ~= 'running' then
    return 0
  end
  redis.call('HSET', K.batch .. batch, 'cancel', 1)
  redis.call('ZREM', K.runnable .. model, batch)
  if state == 'uploading' then
    redis.call('HSET', K.batch .. batch, 'state', 'running', 'total', rows, 'left', rows)
    if rows == '0' then
      finish_batch(batch)
    end
  end
  return 1
end

-- Takes a shard out of any hands, for a batch that is being cancelled. shard, owner, ttl (ms)
-- -> epoch, deadline, group, payload; or nothing when the shard is done
function operation.seize()
  local shard, owner, ttl = unpack(ARGV, 2)
  local batch, state, holder = unpack(redis.call('HMGET', K.shard .. shard, 'b', 'st', 'owner'))
  if state ~= 'ready' and state ~= 'leased' then
    return {}
  end
  if state == 'leased' then
    leave(shard, batch, holder)
  else
    redis.call('LREM', K.ready .. batch, 1, shard)
  end
  local deadline = now_ms() + ttl
  local epoch = redis.call('HINCRBY', K.shard .. shard, 'epoch', 1)
  take(shard, batch, owner, deadline)
  local group, payload = unpack(redis.call('HMGET', K.shard .. shard, 'g', 'p'))
  return { epoch, deadline, group, payload }
end

-- Deletes shards of a batch. batch, shard…
function operation.drop()
  for i = 3, #ARGV do
    local shard = ARGV[i]
    local state, owner = unpack(redis.call('HMGET', K.shard .. shard, 'st', 'owner'))
    if state == 'leased' then
      leave(shard, ARGV[2], owner)
    end
    redis.call('DEL', K.shard .. shard)
    redis.call('SREM', K.shards .. ARGV[2], shard)
  end
end

-- Deletes a batch whose shards are gone.
function operation.forget()
  local batch = ARGV[2]
  local model = redis.call('HGET', K.batch .. batch, 'model_key')
  if model then
    redis.call('ZREM', K.runnable .. model, batch)
  end
  redis.call('ZREM', BATCHES, batch)
  for _, prefix in ipairs({ K.batch, K.ready, K.shards, K.done, K.results }) do
    redis.call('DEL', prefix .. batch)
  end
end

return operation[ARGV[1]]()
