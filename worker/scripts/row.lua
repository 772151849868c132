-- What becomes of rows: recorded once and for ever, given back unstarted, or tried again later.

local function holds(shard, epoch, owner)
  local batch, state, epoch_now, owner_now =
    unpack(redis.call('HMGET', K.shard .. shard, 'b', 'st', 'epoch', 'owner'))
  if epoch_now == epoch and owner_now == owner then
    return batch, state
  end
end

local function end_shard(shard, batch, owner)
  leave(shard, batch, owner)
  move(SHARD, K.shard .. shard, 'done')
  redis.call('HDEL', K.shard .. shard, 'late')
  if redis.call('HEXISTS', K.shard .. shard, 'f') == 0 then
    redis.call('HDEL', K.shard .. shard, 'p') -- with failed rows it is kept, for `retry`
  end
  redis.call('EXPIRE', K.shard .. shard, KEEP_S)
end

-- shard, epoch, owner, {row, '' or why it failed, record}…
-- -> accepted, duplicates, shard done, batch done, fenced, whether a worker has nothing to do
function operation.commit()
  local shard, epoch, owner = ARGV[2], ARGV[3], ARGV[4]
  local batch, state = holds(shard, epoch, owner)
  if state ~= 'leased' and state ~= 'done' then
    return { 0, 0, 0, 0, 1, 0 }
  end
  local fine, failed, duplicates = 0, 0, 0
  local done, results = K.done .. batch, K.results .. batch
  for i = 5, #ARGV, 3 do
    local row, code, record = ARGV[i], ARGV[i + 1], ARGV[i + 2]
    if redis.call('SETBIT', done, row, 1) == 1 then
      duplicates = duplicates + 1
    else
      redis.call('XADD', results, '*', 'i', row, 'r', record, 'e', epoch, 'w', owner)
      if code == '' then
        fine = fine + 1
      else
        failed = failed + 1
        if code ~= CANCELLED then
          redis.call('HSET', K.failed .. batch, row, code)
          redis.call('HSET', K.shard .. shard, 'f', 1)
        end
      end
    end
  end
  local accepted = fine + failed
  local left, attempts, model =
    unpack(redis.call('HMGET', K.batch .. batch, 'left', 'max_attempts', 'model_key'))
  if accepted > 0 then
    redis.call('HINCRBY', K.batch .. batch, 'n_ok', fine)
    redis.call('HINCRBY', K.batch .. batch, 'n_err', failed)
    local recorded = redis.call('HINCRBY', K.shard .. shard, 'd', accepted)
    local rows, deaths = unpack(redis.call('HMGET', K.shard .. shard, 'n', 'deaths'))
    if tonumber(deaths or '0') > 0 then
      local careful = CRASH * (attempts - 1)
      redis.call('HSET', K.shard .. shard, 'deaths', tonumber(deaths) >= careful and careful or 0)
    end
    if recorded == tonumber(rows) then
      end_shard(shard, batch, owner)
      state = 'done'
    end
    left = redis.call('HINCRBY', K.batch .. batch, 'left', -accepted)
    if left == 0 then
      finish_batch(batch)
    end
  end
  return { accepted, duplicates, state == 'done' and 1 or 0, tonumber(left) == 0 and 1 or 0, 0,
    redis.call('EXISTS', K.hungry .. model) }
end

-- Moves rows of a held shard into a new one. The payload of each is what the holder says.
local function split(shard, batch, owner, new, count, moved, rest, state)
  local group = redis.call('HGET', K.shard .. shard, 'g')
  redis.call('HSET', K.shard .. new, 'b', batch, 'g', group, 'n', count, 'd', 0, 'st', state, 'p',
    moved)
  redis.call('SADD', K.shards .. batch, new)
  redis.call('HINCRBY', K.batch .. batch, 'shards', 1)
  redis.call('HSET', K.shard .. shard, 'p', rest)
  local rows = redis.call('HINCRBY', K.shard .. shard, 'n', -count)
  if rows == tonumber(redis.call('HGET', K.shard .. shard, 'd')) then
    end_shard(shard, batch, owner)
  end
  return group
end

-- Whether rows of the batch may still move: a new shard would escape one that is being cancelled.
local function is_open(batch)
  local state = redis.call('HGET', K.batch .. batch, 'st')
  return state == 'running' or state == 'paused'
end

local function ended(shard)
  return redis.call('HGET', K.shard .. shard, 'st') == 'done' and 1 or 0
end

local function any_recorded(batch, first)
  for i = first, #ARGV do
    if redis.call('GETBIT', K.done .. batch, ARGV[i]) == 1 then
      return true
    end
  end
  return false
end

-- Rows that were not started become a shard of their own, ready for others.
-- shard, epoch, owner, new shard, payload moved, payload left, row…
-- -> 1, 0 when the shard is not held, -1 when one of the rows has a record; whether the shard ended
function operation.give_back()
  local shard, epoch, owner, new, moved, left = unpack(ARGV, 2, 7)
  local batch, state = holds(shard, epoch, owner)
  if batch and redis.call('SISMEMBER', K.shards .. batch, new) == 1 then
    return { 1, ended(shard) } -- done before; the answer was lost
  elseif state ~= 'leased' or not is_open(batch) then
    return { 0, 0 }
  elseif any_recorded(batch, 8) then
    return { -1, 0 }
  end
  local group = split(shard, batch, owner, new, #ARGV - 7, moved, left, 'ready')
  show(new, batch, group, 0)
  make_runnable(batch)
  redis.call('DEL', K.hungry .. redis.call('HGET', K.batch .. batch, 'model_key'))
  return { 1, ended(shard) }
end

-- A row failed for a reason that may pass: it becomes a shard of its own, ready after a pause that
-- doubles each time. shard, epoch, owner, new shard, payload moved, payload left, jitter, row
-- -> the pause (ms), 0 when the shard is not held, -1 when the row has a record or no attempt left;
-- whether the shard ended
function operation.retry_row()
  local shard, epoch, owner, new, moved, left, jitter, row = unpack(ARGV, 2)
  local batch, state = holds(shard, epoch, owner)
  if batch and redis.call('SISMEMBER', K.shards .. batch, new) == 1 then
    local due = redis.call('ZSCORE', K.later, new) or '0'
    return { math.max(1, due - now_ms()), ended(shard) }
  elseif state ~= 'leased' or not is_open(batch) then
    return { 0, 0 }
  elseif any_recorded(batch, 9) then
    return { -1, 0 }
  end
  local tried = tonumber(redis.call('HGET', K.attempts .. batch, row) or '0') + 1
  if tried >= tonumber(redis.call('HGET', K.batch .. batch, 'max_attempts')) then
    return { -1, 0 }
  end
  redis.call('HSET', K.attempts .. batch, row, tried)
  split(shard, batch, owner, new, 1, moved, left, 'later')
  redis.call('HSET', K.shard .. new, 'again', 1)
  local pause = math.floor(RETRY_MS * 2 ^ (tried - 1) * jitter)
  redis.call('ZADD', K.later, digits(now_ms() + pause), new)
  return { pause, ended(shard) }
end
