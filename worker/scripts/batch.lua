-- The life of a batch as its owner commands it: upload, seal, pause, resume, cancel, forget.

local function finish_batch(batch)
  local state = redis.call('HGET', K.batch .. batch, 'st')
  move(BATCH, K.batch .. batch, state == 'cancelling' and 'cancelled' or 'done')
  redis.call('HSET', K.batch .. batch, 'finished', digits(now_ms()))
  for _, prefix in ipairs({ K.batch, K.done, K.results, K.shards, K.failed, K.attempts }) do
    redis.call('EXPIRE', prefix .. batch, KEEP_S)
  end
end

-- batch, created (s), model key, model (JSON), spec (JSON), schema, max attempts, class, weight
-- -> 1, or 0 when it exists
function operation.create()
  local batch, created, key, model, spec, schema, attempts, class, weight = unpack(ARGV, 2)
  if redis.call('EXISTS', K.batch .. batch) == 1 then
    return 0
  end
  redis.call('HSET', K.batch .. batch, 'st', 'uploading', 'model_key', key, 'spec', spec,
    'created', created, 'schema', schema, 'max_attempts', attempts, 'prio', class,
    'weight', weight, 'touched', digits(now_ms()), 'total', 0, 'left', 0, 'rows', 0, 'n_ok', 0,
    'n_err', 0, 'shards', 0, 'held', 0)
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
  if redis.call('HGET', K.batch .. batch, 'st') ~= 'uploading' then
    return -1
  end
  redis.call('HSET', K.shard .. shard, 'b', batch, 'g', group, 'n', rows, 'd', 0, 'st', 'ready',
    'p', payload)
  redis.call('SADD', K.shards .. batch, shard)
  if redis.call('RPUSH', K.group .. batch .. ':' .. group, shard) == 1 then
    redis.call('ZADD', K.ready .. batch, string.match(shard, '%-(%d+)$') or 0, group)
  end
  redis.call('HINCRBY', K.batch .. batch, 'shards', 1)
  redis.call('HINCRBY', K.batch .. batch, 'rows', rows)
  redis.call('HSET', K.batch .. batch, 'touched', digits(now_ms()))
  return 1
end

-- uploading -> running. batch, total -> 1 sealed, 0 was sealed before, -1 unknown, -2 rows missing
function operation.seal()
  local batch, total = ARGV[2], tonumber(ARGV[3])
  local state, rows = unpack(redis.call('HMGET', K.batch .. batch, 'st', 'rows'))
  if not state then
    return -1
  elseif state ~= 'uploading' then
    return 0
  elseif tonumber(rows) ~= total then
    return -2
  end
  move(BATCH, K.batch .. batch, 'running')
  redis.call('HSET', K.batch .. batch, 'total', total, 'left', total, 'sealed', digits(now_ms()))
  if total == 0 then
    finish_batch(batch)
  else
    make_runnable(batch)
  end
  return 1
end

-- batch, "paused" or "running" -> 1, or 0 when there is no way from where it is
function operation.turn()
  local batch, to = ARGV[2], ARGV[3]
  local state, model = unpack(redis.call('HMGET', K.batch .. batch, 'st', 'model_key'))
  if state == 'uploading' or not may(BATCH, state, to) then
    return 0 -- an upload begins to run by being sealed only
  end
  move(BATCH, K.batch .. batch, to)
  if to == 'paused' then
    rest(batch, model)
  else
    make_runnable(batch)
  end
  return 1
end

-- batch -> 1, or 0 when it is unknown or over. No shard of it is leased from here on.
function operation.cancel()
  local batch = ARGV[2]
  local state, model, rows = unpack(redis.call('HMGET', K.batch .. batch, 'st', 'model_key', 'rows'))
  if state == 'cancelling' then
    return 1 -- begun before, and cut short
  elseif not may(BATCH, state, 'cancelling') then
    return 0
  end
  move(BATCH, K.batch .. batch, 'cancelling')
  rest(batch, model)
  if state == 'uploading' then
    redis.call('HSET', K.batch .. batch, 'total', rows, 'left', rows)
    if rows == '0' then
      finish_batch(batch)
    end
  end
  return 1
end

-- The client has results on disk up to a stream id, which only grows. batch, id, first id to keep
function operation.acknowledge()
  local batch, id, keep = unpack(ARGV, 2)
  if redis.call('EXISTS', K.batch .. batch) == 0 then
    return 0 -- forgotten meanwhile; writing would bring a piece of it back
  end
  -- first: a server whose memory is full takes this, and nothing that may grow
  redis.call('XTRIM', K.results .. batch, 'MINID', keep)
  local function parts(text)
    local time, number = string.match(text, '(%d+)%-(%d+)')
    return tonumber(time), tonumber(number)
  end
  local time, number = parts(id)
  local before, count = parts(redis.call('HGET', K.batch .. batch, 'exported') or '0-0')
  if time > before or (time == before and number > count) then
    redis.pcall('HSET', K.batch .. batch, 'exported', id)
  end
  return 1
end

-- Deletes shards of a batch. batch, shard…
function operation.drop()
  local batch = ARGV[2]
  for i = 3, #ARGV do
    local shard = ARGV[i]
    local state, owner = unpack(redis.call('HMGET', K.shard .. shard, 'st', 'owner'))
    if state == 'leased' then
      leave(shard, batch, owner)
    end
    redis.call('ZREM', K.later, shard)
    redis.call('DEL', K.shard .. shard)
    redis.call('SREM', K.shards .. batch, shard)
  end
end

-- Deletes a batch whose shards are gone.
function operation.forget()
  local batch = ARGV[2]
  local model = redis.call('HGET', K.batch .. batch, 'model_key')
  if model then
    rest(batch, model)
  end
  for _, places in ipairs({ K.ready, K.shared }) do
    for _, group in ipairs(redis.call('ZRANGE', places .. batch, 0, -1)) do
      redis.call('DEL', K.group .. batch .. ':' .. group)
    end
  end
  redis.call('ZREM', BATCHES, batch)
  for _, prefix in ipairs({ K.batch, K.ready, K.shared, K.suspects, K.owners, K.shards, K.done,
    K.results, K.failed, K.attempts }) do
    redis.call('DEL', prefix .. batch)
  end
end

-- Clears away what nobody needs: names of what has expired, models without a batch.
-- how long an upload may stand still (ms) -> uploads that stood still longer
function operation.sweep()
  local before = now_ms() - ARGV[2]
  local models, abandoned = {}, {}
  for _, batch in ipairs(redis.call('ZRANGE', BATCHES, 0, -1)) do
    local state, model, touched =
      unpack(redis.call('HMGET', K.batch .. batch, 'st', 'model_key', 'touched'))
    if not state then
      redis.call('ZREM', BATCHES, batch)
    else
      models[model] = true
      if state == 'uploading' and tonumber(touched) < before then
        abandoned[#abandoned + 1] = batch
      end
    end
  end
  for _, model in ipairs(redis.call('HKEYS', MODELS)) do
    if not models[model] then
      redis.call('HDEL', MODELS, model)
    end
  end
  for _, worker in ipairs(redis.call('SMEMBERS', K.workers)) do
    if redis.call('EXISTS', K.worker .. worker) == 0 then
      redis.call('SREM', K.workers, worker)
    end
  end
  return abandoned
end
