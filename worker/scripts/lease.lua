-- Who holds which shard: lease, beat, release, and what happens when nobody beats.
--
-- `deaths` of a shard is the suspicion that one of its rows kills engines. A crash that was seen
-- counts CRASH, a lease that ran out counts EXPIRY (sleep and partitions look like that too, and
-- it is taken back when the owner turns out to be alive). A recorded row takes suspicion away.

local function take(shard, batch, group, owner, deadline)
  move(SHARD, K.shard .. shard, 'leased')
  redis.call('HSET', K.shard .. shard, 'owner', owner)
  redis.call('ZADD', LEASES, digits(deadline), shard)
  redis.call('SADD', K.held .. owner, shard)
  redis.call('HINCRBY', K.batch .. batch, 'held', 1)
  count_owner(batch, group, owner, 1)
end

-- out of a worker's hands; the caller moves it on
local function leave(shard, batch, owner)
  redis.call('ZREM', LEASES, shard)
  redis.call('SREM', K.held .. owner, shard)
  redis.call('HINCRBY', K.batch .. batch, 'held', -1)
  count_owner(batch, redis.call('HGET', K.shard .. shard, 'g') or '', owner, -1)
end

local function put_back(shard, batch, owner, suspicion)
  leave(shard, batch, owner)
  move(SHARD, K.shard .. shard, 'ready')
  local deaths = redis.call('HINCRBY', K.shard .. shard, 'deaths', suspicion)
  show(shard, batch, redis.call('HGET', K.shard .. shard, 'g'), deaths)
  make_runnable(batch)
end

local function forgive(shard)
  redis.call('HDEL', K.shard .. shard, 'late')
  local batch, state, group, deaths =
    unpack(redis.call('HMGET', K.shard .. shard, 'b', 'st', 'g', 'deaths'))
  local left = math.max(0, tonumber(deaths or '0') - EXPIRY)
  redis.call('HSET', K.shard .. shard, 'deaths', left)
  if state == 'ready' and left == 0 then
    hide(shard, batch, group)
    show(shard, batch, group, 0)
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

-- Retries whose time has come are ready.
local function wake(limit)
  local due = redis.call('ZRANGEBYSCORE', K.later, '-inf', digits(now_ms()), 'LIMIT', 0, limit)
  for _, shard in ipairs(due) do
    redis.call('ZREM', K.later, shard)
    local batch, state, group = unpack(redis.call('HMGET', K.shard .. shard, 'b', 'st', 'g'))
    if state == 'later' then
      move(SHARD, K.shard .. shard, 'ready')
      show(shard, batch, group, 0)
      make_runnable(batch)
    end
  end
end

-- Batches that the worker may be given, best first.
local function candidates(model, only, oldest, newest)
  local runnable = K.runnable .. model
  local batches = { only }
  if only == '' then
    batches = redis.call('ZRANGE', runnable, 0, 15)
  elseif not redis.call('ZSCORE', runnable, only) then
    return {}
  end
  local fit = {}
  for _, batch in ipairs(batches) do
    local schema = tonumber(redis.call('HGET', K.batch .. batch, 'schema'))
    if schema >= tonumber(oldest) and schema <= tonumber(newest) then
      fit[#fit + 1] = batch
    end
  end
  return fit
end

-- worker, model key, ttl (ms), count, only this batch or '', RQ's list or '', schema from, to,
-- hot groups… -> shards whose lease ran out, {shard, batch, epoch, deadline, group, payload,
-- deaths, max attempts, whether rows were tried before}
function operation.lease()
  local worker, model, ttl, count, only, view, oldest, newest = unpack(ARGV, 2, 9)
  local hot = { unpack(ARGV, 10) }
  local reaped = reap(100)
  wake(100)
  rise()
  if redis.call('HEXISTS', META, 'paused') == 1
    or redis.call('EXISTS', K.drain .. worker) == 1 then
    return { reaped, {} }
  end
  local now = now_ms()
  local busy = redis.call('SCARD', K.held .. worker) > 0
  local leases = {}
  for _ = 1, tonumber(count) do
    local shard, batch, group, suspect
    for _, candidate in ipairs(candidates(model, only, oldest, newest)) do
      shard, group, suspect = pick(candidate, worker, hot, busy)
      batch = candidate
      if shard then
        break
      end
    end
    if not shard then
      break
    end
    local deadline = now + ttl
    local epoch = redis.call('HINCRBY', K.shard .. shard, 'epoch', 1)
    take(shard, batch, group, worker, deadline)
    local rows, payload, deaths, again =
      unpack(redis.call('HMGET', K.shard .. shard, 'n', 'p', 'deaths', 'again'))
    served(batch, model, rows)
    redis.call('HSETNX', K.batch .. batch, 'started', digits(now))
    rest_if_empty(batch)
    if group ~= '' then
      redis.call('SET', K.hot .. group, worker, 'EX', HOT_S)
      table.insert(hot, 1, group)
    end
    if view ~= '' then
      redis.call('LREM', view, 1, shard)
    end
    leases[#leases + 1] = { shard, batch, epoch, deadline, group, payload, tonumber(deaths or '0'),
      tonumber(redis.call('HGET', K.batch .. batch, 'max_attempts')), again and 1 or 0 }
    busy = true
    if suspect then
      break
    end
  end
  if not busy and only == '' then
    redis.call('SET', K.hungry .. model, worker, 'PX', HUNGRY_MS)
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
    local batch, state, epoch_now, owner, late, group =
      unpack(redis.call('HMGET', K.shard .. shard, 'b', 'st', 'epoch', 'owner', 'late', 'g'))
    local verdict = 'lost'
    local mine = epoch_now == epoch and owner == worker
    if late == worker .. ':' .. epoch then
      forgive(shard)
      if mine and state == 'ready' then -- it ran out while we slept, but nobody took it
        hide(shard, batch, group)
        take(shard, batch, group, worker, deadline)
        rest_if_empty(batch)
        if view ~= '' then
          redis.call('LREM', view, 1, shard)
        end
        state = 'leased'
      end
    end
    local whole = batch and redis.call('HGET', K.batch .. batch, 'st')
    if whole == 'cancelling' or whole == 'cancelled' then
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
  wake(tonumber(ARGV[2]))
  return reap(tonumber(ARGV[2]))
end

local function seize(shard, batch, owner, deadline)
  local epoch = redis.call('HINCRBY', K.shard .. shard, 'epoch', 1)
  local group, payload = unpack(redis.call('HMGET', K.shard .. shard, 'g', 'p'))
  take(shard, batch, group, owner, deadline)
  return { shard, epoch, deadline, group, payload }
end

-- Takes shards of a batch that is being cancelled: first all that are ready, then those named, out
-- of any hands. batch, owner, ttl (ms), most, shard… -> {shard, epoch, deadline, group, payload}…
function operation.seize()
  local batch, owner, ttl, most = unpack(ARGV, 2, 5)
  local deadline = now_ms() + ttl
  local seized = {}
  for i = 6, #ARGV do
    local shard = ARGV[i]
    local state, holder, group =
      unpack(redis.call('HMGET', K.shard .. shard, 'st', 'owner', 'g'))
    if may(SHARD, state, 'leased') then
      if state == 'leased' then
        leave(shard, batch, holder)
      elseif state == 'ready' then
        hide(shard, batch, group)
      end
      redis.call('ZREM', K.later, shard)
      seized[#seized + 1] = seize(shard, batch, owner, deadline)
    end
  end
  while #seized < tonumber(most) do
    local shard = pick(batch, owner, {}, false)
    if not shard then
      break
    end
    seized[#seized + 1] = seize(shard, batch, owner, deadline)
  end
  return seized
end
